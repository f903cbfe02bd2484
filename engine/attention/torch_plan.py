"""Index tensors that one step's layers share, for the back ends made of plain torch operators.

A cache [blocks, kv_heads, block_size, head_dim] is read as rows: of head_dim for writing one token and head, of
block_size * head_dim for reading one block and head. The back ends rely on one promise of the cache's owner: what no
request has written is finite (engine/runner/kv_cache.py), since a masked weight of 0 times NaN would be NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import AttentionBatch


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Rows with one query each and about as many blocks to read.

    tokens      int64 [rows]                       their queries
    block_rows  int64 [rows * kv_heads * blocks]   rows of the cache, in the order (row, head, block)
    mask        float [rows, 1, 1, keys]           0 where a key is seen, -inf elsewhere; keys end with the longest row
    """

    tokens: Tensor
    block_rows: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row with several queries, [first_token, first_token + queries) of the step.

    `mask` float [queries, keys] is None when it is the plain causal triangle.
    """

    first_token: int
    queries: int
    keys: int
    block_rows: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class TorchPlan:
    decode: tuple[DecodeBucket, ...]
    prefill: tuple[PrefillRow, ...]


def write_rows(batch: AttentionBatch, kv_heads: int) -> Tensor:
    """Return int64 [tokens * kv_heads]: the cache row of each token and head."""
    block = torch.div(batch.write_index, batch.block_size, rounding_mode="floor")
    heads = torch.arange(kv_heads, device=block.device)
    rows = (block[:, None] * kv_heads + heads) * batch.block_size + (batch.write_index % batch.block_size)[:, None]
    return rows.flatten()


def make_plan(batch: AttentionBatch, kv_heads: int, dtype: torch.dtype, window_tokens: int | None) -> TorchPlan:
    """`dtype` is the query's: masks are made in it once, instead of in every layer."""
    prefill = []
    first_token = 0
    by_width: dict[int, list[tuple[int, int, int]]] = {}
    for row, (queries, keys) in enumerate(zip(batch.host_query_lens, batch.host_kv_lens, strict=True)):
        if queries == 1:
            first_block = _first_block(keys - 1, batch.block_size, window_tokens)
            blocks = -(-keys // batch.block_size) - first_block
            # Powers of two bound both the padding (under 2x) and the number of buckets.
            by_width.setdefault((blocks - 1).bit_length(), []).append((row, first_token, first_block))
        elif queries:
            prefill.append(_prefill_row(batch, kv_heads, dtype, window_tokens, row, first_token))
        first_token += queries
    decode = tuple(_decode_bucket(batch, kv_heads, dtype, window_tokens, members) for members in by_width.values())
    return TorchPlan(decode, tuple(prefill))


def _first_block(position: int, block_size: int, window_tokens: int | None) -> int:
    return 0 if window_tokens is None else max(position - window_tokens + 1, 0) // block_size


def _cache_rows(blocks: Tensor, kv_heads: int) -> Tensor:
    """Turn block ids [rows, blocks] into cache rows, flat in the order (row, head, block)."""
    heads = torch.arange(kv_heads, device=blocks.device)
    return (blocks.long()[:, None, :] * kv_heads + heads[None, :, None]).flatten()


def _decode_bucket(
    batch: AttentionBatch,
    kv_heads: int,
    dtype: torch.dtype,
    window_tokens: int | None,
    members: list[tuple[int, int, int]],
) -> DecodeBucket:
    device, size = batch.positions.device, batch.block_size
    rows, tokens, first_blocks = (torch.tensor(column, device=device) for column in zip(*members, strict=True))
    keys = max(batch.host_kv_lens[row] - first * size for row, _, first in members)
    columns = first_blocks[:, None] + torch.arange(-(-keys // size), device=device)
    last_column = batch.block_tables.shape[1] - 1
    blocks = batch.block_tables[rows[:, None], columns.clamp(max=last_column)] * (columns <= last_column)
    positions = first_blocks[:, None] * size + torch.arange(keys, device=device)
    mask = _mask(positions, batch.kv_lens[rows, None] - 1, dtype, window_tokens)
    return DecodeBucket(tokens, _cache_rows(blocks, kv_heads), mask[:, None, None, :])


def _prefill_row(
    batch: AttentionBatch,
    kv_heads: int,
    dtype: torch.dtype,
    window_tokens: int | None,
    row: int,
    first_token: int,
) -> PrefillRow:
    device, size = batch.positions.device, batch.block_size
    queries, end = batch.host_query_lens[row], batch.host_kv_lens[row]
    first_block = _first_block(end - queries, size, window_tokens)
    blocks = batch.block_tables[row : row + 1, first_block : -(-end // size)]
    first_key = first_block * size
    mask = None
    if queries != end or window_tokens is not None:
        seen_from = torch.arange(end - queries, end, device=device)[:, None]
        mask = _mask(torch.arange(first_key, end, device=device), seen_from, dtype, window_tokens)
    return PrefillRow(first_token, queries, end - first_key, _cache_rows(blocks, kv_heads), mask)


def _mask(keys: Tensor, queries: Tensor, dtype: torch.dtype, window_tokens: int | None) -> Tensor:
    """Return 0 where a query's position sees a key's, -inf elsewhere; the positions broadcast."""
    visible = keys <= queries
    if window_tokens is not None:
        visible &= keys > queries - window_tokens
    return torch.zeros(visible.shape, dtype=dtype, device=keys.device).masked_fill_(~visible, float("-inf"))
