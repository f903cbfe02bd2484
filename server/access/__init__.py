"""Who may ask: API keys and their tenants, the scope secret, the guard in front of the routes, the access log."""
