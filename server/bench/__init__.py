"""`headrace bench`: the engine against what this machine could do, and servers as their clients see them (serve_*)."""
