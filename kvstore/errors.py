"""What the store raises. Tiers do not raise while they work: they report outcomes (kvstore/tier.py).

StoreError
|-- CorruptObjectError    bytes that are not the object they should be
`-- TierUnusableError     a tier that cannot be opened at all
"""

from __future__ import annotations

from typing import Literal

Fault = Literal["short", "magic", "version", "header", "bounds", "identity", "tokens", "payload", "cipher"]


class StoreError(Exception):
    """Anything of the store's own."""


class CorruptObjectError(StoreError):
    """`fault` names the first check that failed, in the order in which they are made."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(f"{fault}: {detail}")
        self.fault = fault


class TierUnusableError(StoreError):
    """The message names the tier's place and what is wrong with it."""
