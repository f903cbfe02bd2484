"""KV blocks: pool, prefix cache, groups. No torch."""
