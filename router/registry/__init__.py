"""Where workers and gateways say that they exist, and where gateways learn of them."""

from router.registry.open import open_registry

__all__ = ["open_registry"]
