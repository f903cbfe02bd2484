"""A digest of a set of block keys, kept up to date in O(1): it tells two views apart without sending them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


def fingerprint(key: bytes) -> int:
    """Return the first 8 bytes of a key, little-endian, and 1 for 0: tables mark what is empty with that.

    Keys are SHA-256 values, so their first bytes are as good as random.
    """
    return int.from_bytes(key[:8], "little") or 1


class Digest(msgspec.Struct, frozen=True, array_like=True):
    """`count` of keys, and the xor of their fingerprints.

    Two different sets have equal digests with a probability of 2^-64. An adversary can construct such sets; all that
    he gains is a router that routes his own prompts badly.
    """

    count: int = 0
    xor: int = 0

    @classmethod
    def of(cls, keys: Iterable[bytes]) -> Digest:
        return cls().plus(keys)

    def plus(self, keys: Iterable[bytes]) -> Digest:
        """Return the digest with `keys` added, none of which is there yet."""
        count, xor = self.count, self.xor
        for key in keys:
            count += 1
            xor ^= fingerprint(key)
        return Digest(count, xor)

    def minus(self, keys: Iterable[bytes]) -> Digest:
        """Return the digest without `keys`, all of which are there."""
        gone = Digest.of(keys)
        return Digest(self.count - gone.count, self.xor ^ gone.xor)
