"""The one call that models make to attend over the paged KV cache, and the registry of its back ends.

Cache layout, one pair of tensors per layer: [num_blocks, kv_heads, block_size, head_dim]. Block 0 is the null block.
KV is always written before it is read, so a token attends over the cache alone and the position of a chunk's border
makes no difference to what is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.layers.fp8 import FP8, rounded


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where each row's tokens stand. Rows are packed: row i's queries are [query_starts[i], query_starts[i + 1]).

    positions     int64 [tokens]         absolute positions
    write_index   int64 [tokens]         block * block_size + offset of each token's KV (inside block 0: not kept)
    block_tables  int32 [rows, blocks]   of this KV group; entries past a row's length are 0
    query_starts  int32 [rows + 1]
    kv_lens       int32 [rows]           tokens to attend over, this step's included
    host_query_lens, host_kv_lens        the same numbers on the host, for planning without a device synchronisation
    """

    positions: Tensor
    write_index: Tensor
    block_tables: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    host_query_lens: tuple[int, ...]
    host_kv_lens: tuple[int, ...]
    block_size: int


class AttentionBackend(Protocol):
    """Causal attention of a mixed batch. `window_tokens` w: position p sees [p - w + 1, p]."""

    name: str

    def write_kv(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
        """Store key and value [tokens, kv_heads, head_dim] at `batch.write_index`."""
        ...

    def attend(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window_tokens: int | None = None,
    ) -> Tensor:
        """Return [tokens, heads, head_dim] for query [tokens, heads, head_dim]; heads is a multiple of kv_heads."""
        ...


@runtime_checkable
class FusedAttention(AttentionBackend, Protocol):
    """A back end for GPUs: it rotates and writes in one pass, and its batches may stay at their place in memory while
    their contents change, so a captured CUDA graph can be replayed.

    It never lets a slot that no token has written touch a result, so such slots may hold anything.
    """

    def rotate_and_write_kv(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Norm (if weights are given) and rotate query and key of qkv [tokens, heads + 2 * kv_heads, head_dim] by the
        tables of `RotaryTables`, store key and value at `batch.write_index`, and return the query
        [tokens, heads, head_dim]."""
        ...


def write_kv_by_index(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
    """Store KV with plain torch operators, on any device."""
    block = torch.div(batch.write_index, batch.block_size, rounding_mode="floor")
    offset = batch.write_index % batch.block_size
    for cache, new in ((k_cache, key), (v_cache, value)):
        movable(cache)[block, :, offset] = movable(as_kept(new, cache.dtype))


def as_kept(new: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values in the cache's type."""
    return rounded(new) if dtype == FP8 else new


def movable(tensor: Tensor) -> Tensor:
    """Return a view that torch's operators on indices take: they know few types of 8 bits."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
