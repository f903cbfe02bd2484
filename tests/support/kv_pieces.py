"""Stored objects over a KV cache of random bytes, and what copying them should give, by plain torch indexing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.protocol import KVGroupSpec
from engine.runner.kv_cache import KVCache
from kvstore.layout import GroupLayout, ObjectLayout
from kvstore.manager.contract import Piece
from kvstore.namespace import GroupShape, Namespace


@dataclass(frozen=True)
class KVShape:
    """A cache of `num_blocks` blocks in each group, and how its groups are cut into objects."""

    groups: tuple[KVGroupSpec, ...]
    dtype: torch.dtype
    block_size: int = 16
    num_blocks: int = 12
    target_bytes: int = 1 << 20
    head_parts: int = 1

    @property
    def layouts(self) -> list[GroupLayout]:
        namespace = Namespace(
            model="m",
            weights_digest="w",
            kv_dtype=str(self.dtype).removeprefix("torch."),
            rope="",
            groups=tuple(
                GroupShape(one.kind, one.layers, one.kv_heads, one.head_dim, window_tokens=one.window_tokens)
                for one in self.groups
            ),
            block_size=self.block_size,
            numerics="",
        )
        return [
            GroupLayout(namespace, group, target_bytes=self.target_bytes, head_parts=self.head_parts)
            for group in range(len(self.groups))
        ]

    def cache(self, device: torch.device, seed: int) -> KVCache:
        """Return a cache full of random bytes, NaNs among them."""
        counts = (self.num_blocks,) * len(self.groups)
        cache = KVCache(self.groups, counts, self.block_size, self.dtype, device, keeps_finite=False)
        generator = torch.Generator().manual_seed(seed)
        for tensor in planes(cache):
            values = torch.randint(256, as_bytes(tensor).shape, dtype=torch.uint8, generator=generator)
            as_bytes(tensor).copy_(values)
        return cache


def _group(layers: Sequence[int], heads: int, dim: int, window: int | None = None) -> KVGroupSpec:
    kind = "full" if window is None else "sliding_window"
    return KVGroupSpec(kind=kind, layers=tuple(layers), kv_heads=heads, head_dim=dim, window_tokens=window)  # type: ignore[arg-type]


BF16 = torch.bfloat16
SHAPES = {
    "whole-blocks": KVShape((_group(range(3), 3, 24),), BF16, target_bytes=3 * 2 * 3 * 16 * 24 * 2),
    "layer-runs": KVShape((_group(range(5), 2, 32),), BF16, target_bytes=2 * 2 * 2 * 16 * 32 * 2),
    "head-runs": KVShape((_group(range(2), 4, 32),), BF16, target_bytes=2 * 2 * 16 * 32 * 2),
    "split-heads": KVShape((_group(range(2), 4, 32),), torch.float16, head_parts=2),
    "spans": KVShape((_group(range(2), 1, 16),), torch.float32, target_bytes=4 * 2 * 2 * 16 * 16 * 4),
    "windows": KVShape((_group((0, 2), 2, 32), _group((1, 3), 2, 32, window=48)), BF16),
    "float8": KVShape((_group(range(2), 2, 32),), torch.float8_e4m3fn),
}


def planes(cache: KVCache) -> Iterator[Tensor]:
    for pair in cache.layers:
        yield from pair


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def pieces_of(shape: KVShape, ids: Sequence[int]) -> list[Piece]:
    """Return the objects, with memory of their own, that hold the blocks `ids` of every group."""
    return [
        Piece(part, tuple(ids[first : first + span]), memoryview(bytearray(b"\xa5" * part.payload_bytes)))
        for layout in shape.layouts
        for first, span in layout.runs(len(ids))
        for part in layout.parts(span)
    ]


def expected_payload(cache: KVCache, piece: Piece) -> bytes:
    """Return the piece's payload by its layout's words; blocks that it lacks are zeros."""
    layout = piece.layout
    return b"".join(
        bytes(_segment(cache, layout, segment.layer, segment.plane, piece.block_ids).contiguous().flatten().tolist())
        for segment in layout.segments
    )


def _segment(cache: KVCache, layout: ObjectLayout, layer: int, plane: str, ids: Sequence[int]) -> Tensor:
    tensor = as_bytes(cache.layers[layer]["kv".index(plane)]).cpu()
    found = tensor[list(ids), layout.head_start : layout.head_stop].clone()
    found[[place for place, block in enumerate(ids) if block == 0]] = 0
    return found
