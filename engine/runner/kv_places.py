"""Where the parts of stored objects lie in an engine's KV tensors.

An object's payload is made of equal chunks: segment by segment, one for each block that it spans. A chunk is some heads
of one block of one layer's keys or values, which lie together in the engine's tensor as well: every transfer is a list
of plain copies between addresses. Knows no device and copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.plan import NULL_BLOCK
from engine.protocol import KVGroupSpec
from engine.runner.kv_cache import KVCache
from kvstore.layout import ObjectLayout, SegmentSpec
from kvstore.manager.contract import Piece

_PLANES = ("k", "v")


@dataclass(frozen=True, slots=True)
class Chunks:
    """One object as chunks of `chunk_bytes`, in the payload's order. `addresses` (int64) tells where each lies in the
    KV cache, 0 where the object has no block; `payload` is the address of the first one in the object."""

    addresses: NDArray[np.int64]
    chunk_bytes: int
    payload: int

    @property
    def size_bytes(self) -> int:
        return len(self.addresses) * self.chunk_bytes


@dataclass(frozen=True, slots=True)
class _Cut:
    """What all objects of one layout share: where each segment's chunk of block 0 lies, and the step to the next."""

    starts: NDArray[np.int64]
    block_bytes: int
    chunk_bytes: int
    num_blocks: int


class KVPlaces:
    """`groups` are the ones that the cache was made for."""

    def __init__(self, cache: KVCache, groups: Sequence[KVGroupSpec]) -> None:
        layers = sorted(layer for group in groups for layer in group.layers)
        self._tensors = dict(zip(layers, cache.layers, strict=True))
        self._cuts: dict[tuple[int, ...], _Cut] = {}

    def chunks(self, piece: Piece, *, writable: bool) -> Chunks:
        """Return an object's chunks; `writable` if its payload is to be written. They are addresses: the piece's
        payload has to be held as long as they are used. Raises ValueError for a piece that does not fit this cache."""
        cut, ids = self._cut(piece.layout), piece.block_ids
        if len(ids) != piece.layout.span or min(ids) < 0 or max(ids) >= cut.num_blocks:
            raise ValueError(f"blocks {list(ids)} are not {piece.layout.span} of {cut.num_blocks}")
        if piece.payload.nbytes != piece.layout.payload_bytes:
            raise ValueError(f"a payload of {piece.payload.nbytes} bytes, not {piece.layout.payload_bytes}")
        payload = np.frombuffer(piece.payload, np.uint8)
        if writable and not payload.flags.writeable:
            raise ValueError("the payload cannot be written")
        numbers = np.array(ids, np.int64)
        addresses = cut.starts[:, None] + numbers * cut.block_bytes
        if NULL_BLOCK in ids:
            addresses[:, numbers == NULL_BLOCK] = 0
        return Chunks(addresses.reshape(-1), cut.chunk_bytes, payload.__array_interface__["data"][0])

    def _cut(self, layout: ObjectLayout) -> _Cut:
        # Of one namespace, these numbers tell the layout: comparing all segments would cost more than a copy.
        name = (layout.group, layout.span, layout.layer_start, layout.layer_stop, layout.head_start, layout.head_stop)
        if name not in self._cuts:
            self._cuts[name] = self._make_cut(layout)
        return self._cuts[name]

    def _make_cut(self, layout: ObjectLayout) -> _Cut:
        starts = [self._start(spec, layout) for spec in layout.segments]
        tensor = self._tensors[layout.segments[0].layer][0]
        return _Cut(
            np.array(starts, np.int64),
            tensor.stride(0) * tensor.itemsize,
            layout.segments[0].size_bytes // layout.span,
            min(self._tensors[spec.layer][0].shape[0] for spec in layout.segments),
        )

    def _start(self, spec: SegmentSpec, layout: ObjectLayout) -> int:
        """Return the address of a segment's heads in block 0."""
        if spec.layer not in self._tensors or spec.plane not in _PLANES:
            raise ValueError(f"this cache has no {spec.plane!r} of layer {spec.layer}")
        tensor = self._tensors[spec.layer][_PLANES.index(spec.plane)]
        heads, rows = layout.head_stop - layout.head_start, tuple(tensor.shape[2:])
        fits = spec.shape == (layout.span, heads, *rows) and layout.head_stop <= tensor.shape[1]
        if not fits or str(tensor.dtype) != f"torch.{spec.dtype}" or not tensor.is_contiguous():
            raise ValueError(f"segments of {spec.dtype} {spec.shape} are not of a cache {tuple(tensor.shape)}")
        return tensor.data_ptr() + layout.head_start * tensor.stride(1) * tensor.itemsize
