"""Routing policies, each one cost function that returns its reasons."""
