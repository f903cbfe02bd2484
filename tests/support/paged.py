"""Random paged attention batches, and attention over them written out in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import AttentionBatch


@dataclass(frozen=True)
class PagedCase:
    """A batch, its query, and a cache whose unused slots are NaN."""

    batch: AttentionBatch
    query: Tensor
    k_cache: Tensor
    v_cache: Tensor


def paged_batch(
    query_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    block_size: int,
    device: torch.device,
    *,
    spare_blocks: int = 0,
) -> AttentionBatch:
    """Give every row blocks of its own in shuffled order, and `spare_blocks` unused table columns."""
    counts = [-(-length // block_size) for length in kv_lens]
    ids = torch.randperm(sum(counts)) + 1
    tables = torch.zeros(len(kv_lens), max(counts) + spare_blocks, dtype=torch.int32)
    positions, slots, taken = [], [], 0
    for row, (query_len, kv_len, count) in enumerate(zip(query_lens, kv_lens, counts, strict=True)):
        tables[row, :count] = ids[taken : taken + count]
        taken += count
        position = torch.arange(kv_len - query_len, kv_len)
        positions.append(position)
        slots.append(tables[row, position // block_size].long() * block_size + position % block_size)
    return AttentionBatch(
        positions=torch.cat(positions).to(device),
        write_index=torch.cat(slots).to(device),
        block_tables=tables.to(device),
        query_starts=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(device),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        host_query_lens=query_lens,
        host_kv_lens=kv_lens,
        block_size=block_size,
    )


def paged_case(
    query_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    *,
    block_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    spare_blocks: int = 0,
) -> PagedCase:
    batch = paged_batch(query_lens, kv_lens, block_size, device, spare_blocks=spare_blocks)
    blocks = int(batch.block_tables.max()) + 1
    shape = (blocks, kv_heads, block_size, head_dim)
    k_cache, v_cache = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
    for row, kv_len in enumerate(kv_lens):
        position = torch.arange(kv_len, device=device)
        block = batch.block_tables[row, position // block_size].long()
        for cache in (k_cache, v_cache):
            cache[block, :, position % block_size] = torch.randn(kv_len, kv_heads, head_dim, device=device).to(dtype)
    # A slice of a wider tensor, as a fused projection gives it.
    wide = torch.randn(sum(query_lens), heads + 2 * kv_heads, head_dim, device=device).to(dtype)
    return PagedCase(batch, wide[:, :heads], k_cache, v_cache)


def attend_in_float64(case: PagedCase, *, scale: float, window_tokens: int | None = None) -> Tensor:
    """Return [tokens, heads, head_dim], one row and one softmax at a time."""
    batch = case.batch
    group = case.query.shape[1] // case.k_cache.shape[1]
    outputs, begin = [], 0
    for row, (query_len, kv_len) in enumerate(zip(batch.host_query_lens, batch.host_kv_lens, strict=True)):
        position = torch.arange(kv_len, device=case.query.device)
        block = batch.block_tables[row, position // batch.block_size].long()
        offset = position % batch.block_size
        keys = case.k_cache[block, :, offset].double().repeat_interleave(group, 1)
        values = case.v_cache[block, :, offset].double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", case.query[begin : begin + query_len].double(), keys) * scale
        query_position = position[kv_len - query_len :, None]
        visible = position[None] <= query_position
        if window_tokens is not None:
            visible &= position[None] > query_position - window_tokens
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
        begin += query_len
    return torch.cat(outputs)
