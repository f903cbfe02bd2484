"""OpenAI's protocol over an Engine: bodies in, JSON or events out. Everything below speaks token ids."""
