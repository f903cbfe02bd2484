"""From files to models: GGUF, Hugging Face directories, packaged models."""
