"""Where the parts of stored objects lie in an engine's KV tensors.

An object's payload is made of equal chunks: segment by segment, one for each block that it spans. A chunk is some heads
of one block of one layer's keys or values, which lie together in the engine's tensor as well: every transfer is a list
of plain copies between addresses. Knows no device and copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.plan import NULL_BLOCK
from engine.protocol import KVGroupSpec
from engine.runner.kv_cache import KVCache
from kvstore.layout import ObjectLayout, SegmentSpec
from kvstore.manager.contract import Piece

_PLANES = ("k", "v")


Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Objects as chunks of `chunk_bytes`, one object after another, in the payloads' order. `addresses` tells where
    each chunk lies in the KV cache, 0 where its object has no block. Object i has `counts[i]` chunks, and `payloads[i]`
    is the address of the first one in it."""

    addresses: Numbers
    chunk_bytes: int
    counts: Numbers
    payloads: Numbers

    @property
    def sizes(self) -> Numbers:
        """Bytes of each object."""
        return self.counts * self.chunk_bytes

    @property
    def size_bytes(self) -> int:
        return len(self.addresses) * self.chunk_bytes

    def places(self, starts: Numbers) -> Numbers:
        """Return the address of every chunk in objects that begin at `starts`."""
        first = np.cumsum(self.counts) - self.counts
        within = np.arange(len(self.addresses)) - np.repeat(first, self.counts)
        return np.repeat(starts, self.counts) + within * self.chunk_bytes

    def batches(self, batch_bytes: int, first_bytes: int) -> Iterator[Chunks]:
        """Cut into runs of objects. The first is the smallest: each is at most twice the one before and of at most
        `batch_bytes`, or of one object."""
        ends = np.cumsum(self.counts)
        first, most = 0, min(batch_bytes, first_bytes)
        while first < len(ends):
            done = int(ends[first - 1]) if first else 0
            stop = max(first + 1, int(np.searchsorted(ends, done + most // self.chunk_bytes, side="right")))
            taken = slice(done, int(ends[stop - 1]))
            yield Chunks(self.addresses[taken], self.chunk_bytes, self.counts[first:stop], self.payloads[first:stop])
            first, most = stop, min(batch_bytes, 2 * most)


@dataclass(frozen=True, slots=True)
class _Cut:
    """What all objects of one layout share: where each segment's chunk of block 0 lies, and the step to the next."""

    starts: Numbers
    block_bytes: int
    chunk_bytes: int
    num_blocks: int


class KVPlaces:
    """`groups` are the ones that the cache was made for."""

    def __init__(self, cache: KVCache, groups: Sequence[KVGroupSpec]) -> None:
        layers = sorted(layer for group in groups for layer in group.layers)
        self._tensors = dict(zip(layers, cache.layers, strict=True))
        self._cuts: dict[tuple[int, ...], _Cut] = {}

    def chunks(self, pieces: Sequence[Piece], *, writable: bool) -> list[Chunks]:
        """Return objects by the size of their chunks, in no order; `writable` if the payloads are to be written. They
        are addresses: the payloads have to be held as long as they are used. Raises ValueError for a piece that does
        not fit this cache."""
        alike: dict[int, list[Piece]] = {}
        for piece in pieces:
            alike.setdefault(id(piece.layout), []).append(piece)
        by_size: dict[int, list[Chunks]] = {}
        for some in alike.values():
            one = self._alike(some, writable=writable)
            by_size.setdefault(one.chunk_bytes, []).append(one)
        return [
            Chunks(
                np.concatenate([one.addresses for one in some]),
                size,
                np.concatenate([one.counts for one in some]),
                np.concatenate([one.payloads for one in some]),
            )
            for size, some in by_size.items()
        ]

    def _alike(self, pieces: Sequence[Piece], *, writable: bool) -> Chunks:
        """Return the chunks of objects that have one layout."""
        layout = pieces[0].layout
        cut = self._cut(layout)
        for piece in pieces:
            if piece.payload.nbytes != layout.payload_bytes:
                raise ValueError(f"a payload of {piece.payload.nbytes} bytes, not {layout.payload_bytes}")
            if writable and piece.payload.readonly:
                raise ValueError("the payload cannot be written")
            if len(piece.block_ids) != layout.span:
                raise ValueError(f"blocks {list(piece.block_ids)} are not {layout.span}")
        ids_of = np.array([piece.block_ids for piece in pieces], np.int64)
        if ids_of.min() < 0 or ids_of.max() >= cut.num_blocks:
            raise ValueError(f"blocks {ids_of.min()} to {ids_of.max()} are not all of {cut.num_blocks}")
        payloads = np.array([piece.address or address_of(piece.payload) for piece in pieces], np.int64)
        addresses = cut.starts[None, :, None] + ids_of[:, None, :] * cut.block_bytes
        addresses[np.broadcast_to(ids_of[:, None, :] == NULL_BLOCK, addresses.shape)] = 0
        counts = np.full(len(pieces), len(cut.starts) * layout.span, np.int64)
        return Chunks(addresses.reshape(-1), cut.chunk_bytes, counts, payloads)

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


def address_of(memory: memoryview) -> int:
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address
