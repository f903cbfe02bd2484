"""The tier on a Redis or Valkey server."""
