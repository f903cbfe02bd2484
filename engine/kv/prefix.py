"""How far a chain of keys is covered by cached blocks, over all KV groups: the hit is the minimum over groups.

Pure lookup: nothing is taken or changed here. Knows windows and keys, not requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.kv.blocks import BlockPool
from engine.plan import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks [0, num_blocks) of a sequence. `tables[group]` has one entry per block: the null block where a sliding
    window has left it behind."""

    num_blocks: int
    tables: tuple[list[int], ...]


def first_visible_block(position: int, window_tokens: int | None, block_size: int) -> int:
    """Return the first block that the token at `position` attends to: it sees [position - window + 1, position]."""
    if window_tokens is None:
        return 0
    return max(0, position - window_tokens + 1) // block_size


def next_position(num_blocks: int, block_size: int, num_tokens: int) -> int:
    """Return the first position to compute behind a hit: the last token is always computed again, for its logits."""
    return min(num_blocks * block_size, num_tokens - 1)


def fit_window(
    has_block: Callable[[int], bool], limit: int, window_tokens: int | None, block_size: int, num_tokens: int
) -> int:
    """Return the largest hit of at most `limit` blocks whose visible blocks are all there.

    When block i is missing, every hit in (i, k] sees it too (the first visible block only moves left as the hit
    shrinks), so the search goes on at i: each block is looked at once.
    """
    hit = limit
    while hit > 0:
        position = next_position(hit, block_size, num_tokens)
        block = hit - 1
        first = first_visible_block(position, window_tokens, block_size)
        while block >= first and has_block(block):
            block -= 1
        if block < first:
            return hit
        hit = block
    return 0


def longest_hit(
    pools: Sequence[BlockPool],
    windows: Sequence[int | None],
    keys: Sequence[bytes],
    block_size: int,
    num_tokens: int,
) -> PrefixHit:
    """Return the longest prefix of `keys` from which a sequence of `num_tokens` can go on in every group."""
    limit = min(len(keys), num_tokens // block_size)
    for pool, window in zip(pools, windows, strict=True):
        if window is None:
            limit = _leading(pool, keys, limit)
    settled = 0
    while settled < len(pools) and limit > 0:
        settled = 0
        for pool, window in zip(pools, windows, strict=True):
            fitting = fit_window(_finder(pool, keys), limit, window, block_size, num_tokens) if window else limit
            settled += fitting == limit
            limit = fitting
    tables = tuple(
        _table(pool, keys, limit, first_visible_block(next_position(limit, block_size, num_tokens), window, block_size))
        for pool, window in zip(pools, windows, strict=True)
    )
    return PrefixHit(limit, tables)


def _leading(pool: BlockPool, keys: Sequence[bytes], limit: int) -> int:
    for index in range(limit):
        if pool.find(keys[index]) is None:
            return index
    return limit


def _finder(pool: BlockPool, keys: Sequence[bytes]) -> Callable[[int], bool]:
    return lambda index: pool.find(keys[index]) is not None


def _table(pool: BlockPool, keys: Sequence[bytes], num_blocks: int, first: int) -> list[int]:
    # Every block in [first, num_blocks) was found, so `or` never hides a miss.
    return [NULL_BLOCK if index < first else pool.find(keys[index]) or NULL_BLOCK for index in range(num_blocks)]
