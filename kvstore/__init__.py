"""The long-lived KV cache. Imports none of the other packages."""
