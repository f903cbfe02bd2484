"""An engine's KV memory of numpy arrays, for the store's tests: slow or failing when told, and every block of it knows
whose bytes it should have."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import numpy as np

from kvstore.layout import SegmentSpec
from kvstore.manager.contract import Piece
from kvstore.namespace import Namespace


class NumpyMemory:
    """`blocks` of each group, block 0 standing for none. `delay_s` slows every copy down, `fail` names directions that
    raise. `using` has the blocks that are being read or written now."""

    def __init__(self, namespace: Namespace, blocks: int) -> None:
        self._block_size = namespace.block_size
        self.planes = {
            (group, layer, plane): np.zeros(
                (blocks, shape.kv_heads, namespace.block_size, shape.head_dim), namespace.kv_dtype
            )
            for group, shape in enumerate(namespace.groups)
            for layer in shape.layers
            for plane in shape.planes
        }
        self.delay_s = 0.0
        self.fail: set[str] = set()
        self.using: dict[tuple[int, int], int] = {}
        self.reads = self.writes = 0
        self._lock = threading.Lock()

    def read(self, pieces: Sequence[Piece]) -> None:
        self._enter(pieces)
        try:
            self._disturb("read")
            for piece in pieces:
                for spec, array in self._segments(piece):
                    piece.payload[spec.offset : spec.offset + spec.size_bytes] = memoryview(array.tobytes())
            self.reads += len(pieces)
        finally:
            self._leave(pieces)

    def write(self, pieces: Sequence[Piece]) -> None:
        self._enter(pieces)
        try:
            self._disturb("write")
            for piece in pieces:
                assert piece.block_ids != (0,), "a block that is none was written"
                for spec, array in self._segments(piece):
                    stored = np.frombuffer(piece.payload[spec.offset : spec.offset + spec.size_bytes], array.dtype)
                    array[...] = stored.reshape(array.shape)
            self.writes += len(pieces)
        finally:
            self._leave(pieces)

    def fill(self, block_ids: Sequence[int], key: bytes) -> None:
        """Compute a block: what is in it depends on its key and its place alone."""
        for (group, layer, plane), array in self.planes.items():
            array[block_ids[group]] = content(key, group, layer, plane, array[0].shape)

    def holds(self, block_ids: Sequence[int], key: bytes) -> bool:
        return all(
            block_ids[group] == 0
            or bool((array[block_ids[group]] == content(key, group, layer, plane, array[0].shape)).all())
            for (group, layer, plane), array in self.planes.items()
        )

    def scribble(self, block_ids: Sequence[int]) -> None:
        """Somebody else uses the blocks."""
        with self._lock:
            for group, block_id in enumerate(block_ids):
                assert block_id == 0 or (group, block_id) not in self.using, (
                    "a block is reused that the store still uses"
                )
        for (group, _, _), array in self.planes.items():
            array[block_ids[group]] = -1.0

    def _segments(self, piece: Piece) -> list[tuple[SegmentSpec, np.ndarray]]:
        layout, (block_id,) = piece.layout, piece.block_ids
        heads = slice(layout.head_start, layout.head_stop)
        return [(spec, self.planes[layout.group, spec.layer, spec.plane][block_id, heads]) for spec in layout.segments]

    def _disturb(self, direction: str) -> None:
        if self.delay_s:
            time.sleep(self.delay_s * random.random())
        if direction in self.fail:
            raise OSError("the device is gone")

    def _enter(self, pieces: Sequence[Piece]) -> None:
        with self._lock:
            for piece in pieces:
                used = (piece.layout.group, piece.block_ids[0])
                self.using[used] = self.using.get(used, 0) + 1

    def _leave(self, pieces: Sequence[Piece]) -> None:
        with self._lock:
            for piece in pieces:
                used = (piece.layout.group, piece.block_ids[0])
                self.using[used] -= 1
                if not self.using[used]:
                    del self.using[used]


def content(key: bytes, group: int, layer: int, plane: str, shape: tuple[int, ...]) -> np.ndarray:
    seed = int.from_bytes(key[:6], "little") * 64 + group * 32 + layer * 2 + (plane == "k")
    start = seed % 100_003
    return np.arange(start, start + int(np.prod(shape)), dtype=np.float32).reshape(shape)
