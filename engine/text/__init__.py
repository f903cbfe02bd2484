"""Token ids to text and back. Runs in the API process, never in the engine loop."""
