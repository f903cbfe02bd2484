"""How the blocks of a group are cut into objects of 0.5 to 2 MiB, and what lies where in each.

A fat block becomes several objects, each of a run of layers (and, where one layer is too fat, of a run of heads). Thin
blocks are put together: an object then spans several blocks on a grid that starts at a sequence's first block. Within
an object segments come layer by layer and plane by plane; a segment is [span, heads, block_size / ratio, head_dim], so
that of each block it holds one piece that is contiguous in the object and in the engine's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from kvstore.namespace import DTYPE_BYTES, Namespace
from kvstore.object_key import MAX_COORDINATE, ObjectKey

TARGET_BYTES = 1 << 20
MAX_SPAN = 64
"""However thin a block is: an object that spans more tokens would rarely be whole."""

HEADER_BYTES = 4096
"""Headers fill a multiple of this, so that payloads begin on a page."""

FIXED_HEADER_BYTES = 320
SEGMENT_ENTRY_BYTES = 40


class SegmentSpec(msgspec.Struct, frozen=True, array_like=True):
    """One plane of one layer: an array of `dtype` and `shape`, `offset` bytes into the payload."""

    plane: str
    layer: int
    dtype: str
    shape: tuple[int, int, int, int]
    offset: int
    size_bytes: int


class ObjectLayout(msgspec.Struct, frozen=True, array_like=True):
    """What one object of `span` blocks holds. `segments` fill the payload without gaps."""

    group: int
    span: int
    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int
    segments: tuple[SegmentSpec, ...]
    payload_bytes: int

    @property
    def header_bytes(self) -> int:
        return header_bytes(len(self.segments))

    @property
    def object_bytes(self) -> int:
        """Header and payload: what a slot, a file or a value of it takes."""
        return self.header_bytes + self.payload_bytes

    def key(self, namespace: bytes, owner: bytes, block: bytes) -> ObjectKey:
        """Return the key of the object whose last block is `block`; `namespace` is the digest."""
        return ObjectKey(
            namespace,
            owner,
            block,
            self.group,
            self.span,
            self.layer_start,
            self.layer_stop,
            self.head_start,
            self.head_stop,
        )


def header_bytes(segments: int) -> int:
    """Return the bytes of a header with so many segments."""
    needed = FIXED_HEADER_BYTES + segments * SEGMENT_ENTRY_BYTES
    return -(-needed // HEADER_BYTES) * HEADER_BYTES


class GroupLayout:
    """The cut of one group. It depends on the namespace and `target_bytes` alone, not on who computes which layers;
    `head_parts` cuts heads finer, for engines that split them; `max_span` bounds the blocks of an object. Engines that
    cut differently miss each other's objects.
    """

    def __init__(
        self,
        namespace: Namespace,
        group: int,
        *,
        target_bytes: int = TARGET_BYTES,
        head_parts: int = 1,
        max_span: int = MAX_SPAN,
    ) -> None:
        shape = namespace.groups[group]
        if shape.kv_heads % head_parts:
            raise ValueError(f"{shape.kv_heads} KV heads cannot be cut into {head_parts} equal parts")
        self.group, self._shape = group, shape
        self._dtype = namespace.kv_dtype
        self._rows = namespace.block_size // shape.ratio
        head_bytes = len(shape.planes) * self._rows * shape.head_dim * DTYPE_BYTES[namespace.kv_dtype]
        heads = _largest_divisor(shape.kv_heads // head_parts, target_bytes / head_bytes)
        runs = _even_runs(len(shape.layers), target_bytes / (head_bytes * heads))
        self._head_runs = [(start, start + heads) for start in range(0, shape.kv_heads, heads)]
        self._layer_runs = [shape.layers[start:stop] for start, stop in runs]
        span = _span(target_bytes / (head_bytes * heads * len(shape.layers))) if len(runs) == 1 else 1
        self.span = min(span, max_span)
        """Blocks of a whole object."""
        self._parts: dict[int, tuple[ObjectLayout, ...]] = {}

    def parts(self, span: int) -> tuple[ObjectLayout, ...]:
        """Return the objects that `span` blocks are cut into: `self.span`, or fewer at the end of a sequence."""
        if not 0 < span <= self.span:
            raise ValueError(f"objects of group {self.group} span 1 to {self.span} blocks, not {span}")
        if span not in self._parts:
            self._parts[span] = tuple(
                self._part(span, layers, heads) for layers in self._layer_runs for heads in self._head_runs
            )
        return self._parts[span]

    def runs(self, num_blocks: int) -> list[tuple[int, int]]:
        """Return (first block, span) of the objects that cover the first `num_blocks` blocks of a sequence."""
        return [(first, min(self.span, num_blocks - first)) for first in range(0, num_blocks, self.span)]

    def _part(self, span: int, layers: Sequence[int], heads: tuple[int, int]) -> ObjectLayout:
        shape = (span, heads[1] - heads[0], self._rows, self._shape.head_dim)
        size = math.prod(shape) * DTYPE_BYTES[self._dtype]
        places = [(layer, plane) for layer in layers for plane in self._shape.planes]
        segments = tuple(
            SegmentSpec(plane, layer, self._dtype, shape, index * size, size)
            for index, (layer, plane) in enumerate(places)
        )
        return ObjectLayout(
            self.group, span, layers[0], layers[-1] + 1, heads[0], heads[1], segments, len(segments) * size
        )


def _largest_divisor(number: int, limit: float) -> int:
    """Return the largest divisor of `number` up to `limit`, at least 1."""
    return max(one for one in range(1, number + 1) if number % one == 0 and (one <= limit or one == 1))


def _even_runs(total: int, limit: float) -> list[tuple[int, int]]:
    """Cut [0, total) into runs that differ by one at most, each of about `limit` and of at least 1."""
    parts = math.ceil(total / max(1, round(limit)))
    ends = [part * total // parts for part in range(parts + 1)]
    return list(pairwise(ends))


def _span(limit: float) -> int:
    """Return the largest power of two up to `limit`, in [1, MAX_SPAN]."""
    return min(1 << int(math.log2(limit)), MAX_SPAN) if limit >= 1 else 1


assert MAX_SPAN <= MAX_COORDINATE
