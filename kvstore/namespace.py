"""Namespaces: whose bytes mean the same. KV may be shared between engines only where everything here is equal.

A namespace is a prefix of object keys and no part of the chain of block keys (kvstore/keys.py): who may share a prompt
is told by the chain's root, how its KV was computed and laid out is told here. Parallelism is in neither: a shard is a
range of layers and heads, in absolute numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

_TAG = b"headrace kv namespace v2\n"

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Sizes of the types that KV can have. Packed rows of several types are uint8."""


class GroupShape(msgspec.Struct, frozen=True, array_like=True):
    """Layers that share one block table. Of every layer a block has, for each plane, an array
    [kv_heads, block_size / ratio, head_dim]; groups without a head axis have kv_heads 1.

    `layers` are absolute and ascending. `ratio` tokens are one row in a compressed group.
    """

    kind: str
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    planes: tuple[str, ...] = ("k", "v")
    window_tokens: int | None = None
    ratio: int = 1


class Namespace(msgspec.Struct, frozen=True, array_like=True):
    """Every field changes the digest, so that a difference in any is a miss.

    `weights_digest` is over the bytes of the tensors, and `weights_epoch` names an update of running weights: "" is
    none, and two updates share a name only if they gave the same weights. `adapter` names an adapter's content, and
    `scales` that of a quantised cache's scales; "" is none. `rope` is canonical text of all that decides positions
    (`canonical`). `numerics` names what decides the last bit: mode, operators and their version, device.
    """

    model: str
    weights_digest: str
    kv_dtype: str
    rope: str
    groups: tuple[GroupShape, ...]
    block_size: int
    numerics: str
    weights_epoch: str = ""
    adapter: str = ""
    scales: str = ""
    layout: str = "heads-tokens-dim"

    def __post_init__(self) -> None:
        if not self.weights_digest:
            raise ValueError("a namespace needs the digest of the weights: without it another model's KV could be hit")
        if self.kv_dtype not in DTYPE_BYTES:
            raise ValueError(f"kv_dtype {self.kv_dtype!r} is none of {', '.join(DTYPE_BYTES)}")
        for group in self.groups:
            if self.block_size % group.ratio:
                raise ValueError(f"block_size {self.block_size} is no multiple of the group's ratio {group.ratio}")

    @property
    def digest(self) -> bytes:
        """Return 32 bytes. MessagePack tags types and lengths, so no two namespaces share an encoding."""
        return hashlib.sha256(_TAG + msgspec.msgpack.encode(self)).digest()


def canonical(values: Mapping[str, Any]) -> str:
    """Return one text for equal values, whatever their order: JSON with sorted names. Raises ValueError for NaN."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
