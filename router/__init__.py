"""Chooses a target for each request and sees the request through: pools, attempts, resumption."""
