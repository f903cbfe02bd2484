"""The name of a stored object: one function makes it, everyone who stores, looks up, loads or deletes uses it.

    <namespace, 64 hex>/<owner, 32 hex>/<end key, 64 hex><group, 2><span, 4><layers, 4 + 4><heads, 4 + 4>

Names are made of hex digits alone: no text of a user or of a model ever gets into a path or a server's key.
"""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from kvstore.keys import KEY_BYTES, OWNER_BYTES

_NAME = re.compile(r"([0-9a-f]{64})/([0-9a-f]{32})/([0-9a-f]{64})([0-9a-f]{2})([0-9a-f]{4})" + r"([0-9a-f]{4})" * 4)
MAX_COORDINATE = 0xFFFF


@lru_cache(maxsize=1024)
def _coordinates(group: int, span: int, layer_start: int, layer_stop: int, head_start: int, head_stop: int) -> str:
    """Return what all objects of one part of a layout have in common: a look-up makes hundreds of names."""
    return f"{group:02x}{span:04x}{layer_start:04x}{layer_stop:04x}{head_start:04x}{head_stop:04x}"


class ObjectKey(msgspec.Struct, frozen=True, array_like=True, gc=False, cache_hash=True):
    """`span` blocks that end with `block` (a block key): of the group's layers those in [layer_start, layer_stop), of
    its heads those in [head_start, head_stop).

    `namespace` is a Namespace's digest. `owner` is whose quota the object counts against (`kvstore.keys.owner_of`): the
    block key depends on it already.
    """

    namespace: bytes
    owner: bytes
    block: bytes
    group: int
    span: int
    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int

    def __post_init__(self) -> None:
        # Plain comparisons: a look-up makes hundreds of keys.
        if not len(self.namespace) == len(self.block) == KEY_BYTES or len(self.owner) != OWNER_BYTES:
            raise ValueError("namespace and block key have 32 bytes, owner 16")
        if not (
            0 <= self.layer_start < self.layer_stop <= MAX_COORDINATE
            and 0 <= self.head_start < self.head_stop <= MAX_COORDINATE
            and 0 < self.span <= MAX_COORDINATE
        ):
            raise ValueError("ranges of layers and heads are not empty, and a span has a block")
        if not 0 <= self.group <= 0xFF:
            raise ValueError(f"group {self.group} is not in [0, 255]")

    @property
    def leaf(self) -> str:
        """The last part of the name, 86 hex digits: unique within namespace and owner."""
        return self.block.hex() + _coordinates(
            self.group, self.span, self.layer_start, self.layer_stop, self.head_start, self.head_stop
        )

    @property
    def name(self) -> str:
        return f"{self.namespace.hex()}/{self.owner.hex()}/{self.leaf}"

    @classmethod
    def parse(cls, name: str) -> ObjectKey:
        """Return the key of a name. Raises ValueError for what is none."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise ValueError("not the name of an object")
        namespace, owner, block = (bytes.fromhex(text) for text in found.groups()[:3])
        group, span, layer_start, layer_stop, head_start, head_stop = (int(text, 16) for text in found.groups()[3:])
        return cls(namespace, owner, block, group, span, layer_start, layer_stop, head_start, head_stop)
