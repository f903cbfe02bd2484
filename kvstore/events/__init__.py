"""KV events: what a cache holds, told as it changes, so that a router can know it."""
