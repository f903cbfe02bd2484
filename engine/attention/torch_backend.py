"""Back end "torch": attention from plain torch operators, on any device.

The query heads of one KV head are handed to scaled_dot_product_attention as rows of one head: its own enable_gqa reads
KV many times slower on CPUs. Blocks are gathered once per layer, and rows of similar length share a call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import AttentionBatch, as_kept, movable
from engine.attention.torch_plan import DecodeBucket, PrefillRow, TorchPlan, make_plan, write_rows


class TorchAttention:
    name = "torch"

    def __init__(self) -> None:
        self._writing: tuple[AttentionBatch, int, Tensor] | None = None
        self._reading: tuple[AttentionBatch, tuple[int, torch.dtype, int | None], TorchPlan] | None = None

    def write_kv(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
        rows = self._write_rows(batch, k_cache.shape[1])
        head_dim = k_cache.shape[-1]
        for cache, new in ((k_cache, key), (v_cache, value)):
            kept = as_kept(new.reshape(-1, head_dim), cache.dtype)
            movable(cache).view(-1, head_dim).index_copy_(0, rows, movable(kept))

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
        plan = self._plan(batch, k_cache.shape[1], query.dtype, window_tokens)
        if len(plan.decode) == 1 and not plan.prefill:
            return _attend_decode(query, k_cache, v_cache, plan.decode[0], scale)
        output = torch.empty_like(query)
        for bucket in plan.decode:
            output[bucket.tokens] = _attend_decode(query[bucket.tokens], k_cache, v_cache, bucket, scale)
        for row in plan.prefill:
            tokens = slice(row.first_token, row.first_token + row.queries)
            output[tokens] = _attend_prefill(query[tokens], k_cache, v_cache, row, scale)
        return output

    # What follows is made once per step: all layers of a KV group share the batch object.

    def _write_rows(self, batch: AttentionBatch, kv_heads: int) -> Tensor:
        kept = self._writing
        if kept is None or kept[0] is not batch or kept[1] != kv_heads:
            self._writing = kept = (batch, kv_heads, write_rows(batch, kv_heads))
        return kept[2]

    def _plan(self, batch: AttentionBatch, kv_heads: int, dtype: torch.dtype, window_tokens: int | None) -> TorchPlan:
        kept, shape = self._reading, (kv_heads, dtype, window_tokens)
        if kept is None or kept[0] is not batch or kept[1] != shape:
            self._reading = kept = (batch, shape, make_plan(batch, kv_heads, dtype, window_tokens))
        return kept[2]


def _gather(cache: Tensor, block_rows: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Return [rows, kv_heads, keys, head_dim] of `dtype`."""
    _, kv_heads, block_size, head_dim = cache.shape
    picked = movable(cache).view(-1, block_size * head_dim).index_select(0, block_rows)
    return picked.view(cache.dtype).to(dtype).view(rows, kv_heads, -1, head_dim)


def _attend_decode(query: Tensor, k_cache: Tensor, v_cache: Tensor, bucket: DecodeBucket, scale: float) -> Tensor:
    rows, heads, head_dim = query.shape
    seen = bucket.mask.shape[-1]
    keys = _gather(k_cache, bucket.block_rows, rows, query.dtype)[:, :, :seen]
    values = _gather(v_cache, bucket.block_rows, rows, query.dtype)[:, :, :seen]
    grouped = query.reshape(rows, keys.shape[1], -1, head_dim)
    mask = bucket.mask.expand(-1, 1, grouped.shape[2], -1)
    attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return attended.reshape(rows, heads, head_dim)


def _attend_prefill(query: Tensor, k_cache: Tensor, v_cache: Tensor, row: PrefillRow, scale: float) -> Tensor:
    queries, heads, head_dim = query.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    # [kv_heads, group, ...]: the group's keys are expanded, not copied.
    grouped = query.view(queries, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys, values = (
        _gather(cache, row.block_rows, 1, query.dtype)[0, :, None, : row.keys].expand(-1, group, -1, -1)
        for cache in (k_cache, v_cache)
    )
    attended = F.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=row.mask, is_causal=row.mask is None, scale=scale
    )
    return attended.permute(2, 0, 1, 3).reshape(queries, heads, head_dim)
