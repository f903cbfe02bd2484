"""The composition root of every process: HTTP, OpenAI protocol, CLI."""
