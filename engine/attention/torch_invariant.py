"""Back end "torch_invariant": a token's result is bitwise the same alone, batched, chunked, cached or resumed.

Every product has one shape, [kv_heads, QUERY_TILE * group, head_dim] x [kv_heads, head_dim, block_size], and a token
always stands in the same row of it: query tiles begin at absolute multiples of QUERY_TILE, KV tiles are the blocks at
absolute multiples of the block size. A tile that is not full is padded. Scores are kept whole, so the maximum (exact in
any order) is known before the weights, and tiles are then summed from the first to the last. A tile that a token does
not see adds exactly 0. All in float32, whatever the cache's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import AttentionBatch, movable, write_kv_by_index
from engine.plan import NULL_BLOCK

QUERY_TILE = 16


@dataclass(frozen=True, slots=True)
class _Tile:
    """Query positions [start, start + QUERY_TILE) of one row; its tokens are [first_token, last_token) of the step."""

    start: int
    first_token: int
    last_token: int
    offset: int


class TorchInvariantAttention:
    name = "torch_invariant"

    def write_kv(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
        write_kv_by_index(key, value, k_cache, v_cache, batch)

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
        output = torch.empty_like(query)
        first_token = 0
        for row, (queries, end) in enumerate(zip(batch.host_query_lens, batch.host_kv_lens, strict=True)):
            start = end - queries
            first_block = _first_block(start, batch.block_size, window_tokens)
            blocks = batch.block_tables[row, first_block : -(-end // batch.block_size)].long()
            # The tile's padded queries see further back than any token: there, blocks may be another request's by now.
            blocks[: _seen_from(start, batch.block_size, window_tokens) - first_block] = NULL_BLOCK
            keys, values = (movable(cache)[blocks].view(cache.dtype).float() for cache in (k_cache, v_cache))
            for tile in _tiles(start, queries, first_token):
                seen = -(-min(tile.start + QUERY_TILE, end) // batch.block_size) - first_block
                visible = _visible(tile.start, first_block * batch.block_size, seen * batch.block_size, window_tokens)
                tokens = slice(tile.first_token, tile.last_token)
                attended = _attend_tile(query[tokens], tile.offset, keys[:seen], values[:seen], visible, scale)
                output[tokens] = attended.to(query.dtype)
            first_token += queries
        return output


def _tiles(start: int, queries: int, first_token: int) -> list[_Tile]:
    end = start + queries
    tiles = []
    for tile_start in range(start // QUERY_TILE * QUERY_TILE, end, QUERY_TILE):
        low, high = max(tile_start, start), min(tile_start + QUERY_TILE, end)
        tiles.append(_Tile(tile_start, first_token + low - start, first_token + high - start, low - tile_start))
    return tiles


def _attend_tile(query: Tensor, offset: int, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Return float32 [tokens, heads, head_dim] for the queries in rows [offset, offset + tokens) of their tile.

    keys and values are [blocks, kv_heads, block_size, head_dim], visible is bool [QUERY_TILE, keys].
    """
    tokens, heads, head_dim = query.shape
    blocks, kv_heads, block_size, _ = keys.shape
    rows = slice(offset, offset + tokens)
    padded = torch.zeros(QUERY_TILE, heads, head_dim)
    padded[rows] = query.float() * scale
    # [kv_heads, QUERY_TILE * group, head_dim]
    grouped = padded.view(QUERY_TILE, kv_heads, -1, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
    scores = torch.stack([torch.bmm(grouped, keys[block].transpose(1, 2)) for block in range(blocks)])
    hidden = ~visible.view(QUERY_TILE, 1, blocks, block_size).permute(2, 1, 0, 3).unsqueeze(3)
    scores.view(blocks, kv_heads, QUERY_TILE, -1, block_size).masked_fill_(hidden, float("-inf"))
    highest = scores.amax(dim=(0, 3), keepdim=True)
    weights = torch.exp(scores - highest)
    sums = weights.sum(dim=-1, keepdim=True)
    total, weighted = sums[0], torch.bmm(weights[0], values[0])
    for block in range(1, blocks):
        total = total + sums[block]
        weighted = weighted + torch.bmm(weights[block], values[block])
    attended = (weighted / total).view(kv_heads, QUERY_TILE, -1, head_dim)[:, rows]
    return attended.transpose(0, 1).reshape(tokens, heads, head_dim)


def _first_block(start: int, block_size: int, window_tokens: int | None) -> int:
    """Return the first block that a tile beginning at or before `start` sees. It goes by the tile, not by the chunk:
    the tile's padded queries need a key as well."""
    return _seen_from(start // QUERY_TILE * QUERY_TILE, block_size, window_tokens)


def _seen_from(position: int, block_size: int, window_tokens: int | None) -> int:
    """Return the first block that a token at `position` sees."""
    return 0 if window_tokens is None else max(position - window_tokens + 1, 0) // block_size


def _visible(tile_start: int, first_key: int, keys: int, window_tokens: int | None) -> Tensor:
    """Return bool [QUERY_TILE, keys] for keys at [first_key, first_key + keys)."""
    positions = torch.arange(tile_start, tile_start + QUERY_TILE)[:, None]
    key_positions = torch.arange(first_key, first_key + keys)
    visible = key_positions <= positions
    if window_tokens is not None:
        visible &= key_positions > positions - window_tokens
    return visible
