"""Block keys: the one identity that engine, store, transfer and router share.

A key names a block by everything its KV depends on: the scope (who may share it) and every token from the start of the
sequence to the block's end. It knows nothing of models or dtypes: those are the namespace, a prefix of store keys.

    root  = scope                                       32 bytes: 16 of the owner, 16 of owner and salt
    key_i = SHA-256(key_{i-1} | token ids of block i, u32 little-endian | extras)

Each extra is tagged by kind and length-prefixed, so that no two lists of extras share an encoding.
"""

from __future__ import annotations

import hashlib
import hmac
from array import array
from collections.abc import Iterable, Sequence
from sys import byteorder

KEY_BYTES = 32
OWNER_BYTES = 16
_WORD_BYTES = 4
PUBLIC_SCOPE = hashlib.sha256(b"headrace public scope v1").digest()
"""The scope of everyone where no API keys are configured."""


def tenant_scope(secret: bytes, tenant: str, salt: str = "") -> bytes:
    """Return the 32-byte scope of one tenant (and cache salt). It cannot be computed without `secret`.

    All scopes of a tenant share their first half, so that what they store counts against one quota.
    """
    tenant_bytes = tenant.encode()
    message = len(tenant_bytes).to_bytes(4, "little") + tenant_bytes
    owner = hmac.digest(secret, b"owner" + message, "sha256")
    return owner[:OWNER_BYTES] + hmac.digest(secret, b"scope" + message + salt.encode(), "sha256")[OWNER_BYTES:]


def owner_of(scope: bytes) -> bytes:
    """Return the 16 bytes that name whose KV a scope's is. Not secret, and no way back to the tenant's name."""
    return scope[:OWNER_BYTES]


def _encode_extras(extras: Iterable[tuple[str, bytes]]) -> bytes:
    parts = []
    for kind, value in extras:
        kind_bytes = kind.encode()
        parts.append(len(kind_bytes).to_bytes(1, "little") + kind_bytes + len(value).to_bytes(4, "little") + value)
    return b"".join(parts)


def token_words(token_ids: Sequence[int]) -> bytes:
    """Return token ids as u32 little-endian. Raises OverflowError or TypeError for what is no such number."""
    words = array("I", token_ids)
    if byteorder == "big":
        words.byteswap()
    return words.tobytes()


def tokens_of_words(words: bytes) -> array[int]:
    """Return the token ids in `words`. Raises ValueError when it ends within one."""
    token_ids = array("I")
    token_ids.frombytes(words)
    if byteorder == "big":
        token_ids.byteswap()
    return token_ids


def block_key(parent: bytes, token_ids: Sequence[int], extras: Iterable[tuple[str, bytes]] = ()) -> bytes:
    """Return the 32-byte key of the block that holds `token_ids` after `parent` (a key or a scope)."""
    return hashlib.sha256(parent + token_words(token_ids) + _encode_extras(extras)).digest()


class KeyChain:
    """The keys of one sequence's full blocks, extended as the sequence grows. One walk serves every pool."""

    def __init__(self, scope: bytes, block_size: int) -> None:
        self.block_size = block_size
        self.scope = scope
        self.keys: list[bytes] = []

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Add the keys of the blocks that `token_ids` (the whole sequence so far) fills; return all keys."""
        size, known = self.block_size, len(self.keys)
        parent = self.keys[-1] if self.keys else self.scope
        # One conversion for all new blocks: it takes as long as hashing them.
        new = token_words(token_ids[known * size : len(token_ids) // size * size])
        step = size * _WORD_BYTES
        for start in range(0, len(new), step):
            parent = hashlib.sha256(parent + new[start : start + step]).digest()
            self.keys.append(parent)
        return self.keys
