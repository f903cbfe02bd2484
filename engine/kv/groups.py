"""The block tables of sequences over all KV groups: every change happens in all groups or in none.

A sequence has one table per group. All its tables have the same length, so block i of every table is about the same
tokens; a sliding window's table has the null block where the window has passed. Knows no requests and no policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from engine.kv.blocks import BlockEvent, BlockPool, EventSink
from engine.kv.prefix import PrefixHit, first_visible_block, fit_window, longest_hit, next_position
from engine.plan import NULL_BLOCK
from engine.protocol import KVGroupSpec

Tables = list[list[int]]
GroupEventSink = Callable[[int, BlockEvent], None]

WATERMARK = 0.01
"""Share of each pool that admission leaves free, so that running sequences can grow a while before one is preempted."""


class KVGroups:
    """One pool per group. `num_blocks` counts the null block of each."""

    def __init__(
        self,
        specs: Sequence[KVGroupSpec],
        num_blocks: Sequence[int],
        block_size: int,
        on_event: GroupEventSink | None = None,
    ) -> None:
        if not specs or len(specs) != len(num_blocks):
            raise ValueError(f"{len(specs)} KV groups, but {len(num_blocks)} block counts")
        self.block_size = block_size
        self.windows = tuple(spec.window_tokens if spec.kind == "sliding_window" else None for spec in specs)
        self.pools = tuple(BlockPool(n, _tag(on_event, group)) for group, n in enumerate(num_blocks))
        self.no_new_blocks: tuple[tuple[int, ...], ...] = ((),) * len(self.pools)
        self._slides = any(self.windows)
        self._watermarks = tuple(int(pool.capacity * WATERMARK) for pool in self.pools)

    @property
    def blocks_total(self) -> int:
        return sum(pool.capacity for pool in self.pools)

    @property
    def blocks_used(self) -> int:
        return sum(pool.num_used for pool in self.pools)

    @property
    def max_sequence_tokens(self) -> int | None:
        """Tokens of the longest sequence that fits when it is alone; None where no group bounds it.

        A sliding window holds at most ceil(window / block_size) blocks behind the next token, and one to write to.
        """
        bounds = [
            pool.capacity * self.block_size
            for pool, window in zip(self.pools, self.windows, strict=True)
            if window is None or pool.capacity < -(-window // self.block_size) + 1
        ]
        return min(bounds, default=None)

    def match(self, keys: Sequence[bytes], num_tokens: int) -> PrefixHit:
        return longest_hit(self.pools, self.windows, keys, self.block_size, num_tokens)

    def room(self, hit: PrefixHit | None = None, *, above_watermark: bool = False) -> int:
        """Return how many fresh blocks each group can give, on top of the blocks of `hit`."""
        free = [pool.num_free for pool in self.pools]
        if hit is not None:
            for group, (pool, table) in enumerate(zip(self.pools, hit.tables, strict=True)):
                free[group] -= sum(1 for block in table if block != NULL_BLOCK and pool.users(block) == 0)
        if above_watermark:
            return min(n - mark for n, mark in zip(free, self._watermarks, strict=True))
        return min(free)

    def adopt(self, hit: PrefixHit, num_blocks: int, first_position: int | None = None) -> Tables:
        """Start a sequence on a hit, with fresh blocks up to `num_blocks`; the caller has checked `room(hit)`.

        With `first_position`, blocks that are out of its window get the null block instead of a fresh one.
        """
        tables: Tables = []
        # All hits before the first allocation: a fresh block must not be one that another entry is about to share.
        for pool, table in zip(self.pools, hit.tables, strict=True):
            for block in table:
                if block != NULL_BLOCK:
                    pool.share(block)
            tables.append(list(table))
        for pool, window, table in zip(self.pools, self.windows, tables, strict=True):
            first = 0 if first_position is None else first_visible_block(first_position, window, self.block_size)
            table.extend(NULL_BLOCK if i < first else pool.allocate() for i in range(hit.num_blocks, num_blocks))
        return tables

    def extend(self, tables: Tables, num_blocks: int) -> bool:
        """Grow every table to `num_blocks`, or none: return whether there was room."""
        missing = num_blocks - len(tables[0])
        for pool in self.pools:
            if pool.num_free < missing:
                return False
        for pool, table in zip(self.pools, tables, strict=True):
            for _ in range(missing):
                table.append(pool.allocate())
        return True

    def truncate(self, tables: Tables, num_blocks: int) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            pool.free(reversed(table[num_blocks:]))
            del table[num_blocks:]

    def release(self, tables: Tables) -> None:
        """Drop the sequence's use of all its blocks, tails first."""
        if tables:
            self.truncate(tables, 0)

    def usable_blocks(self, tables: Tables, limit: int, num_tokens: int) -> int:
        """Return the largest hit of at most `limit` blocks whose visible blocks are in `tables`."""
        settled = False
        while not settled:
            settled = True
            for window, table in zip(self.windows, tables, strict=True):
                fitting = fit_window(_holder(table), limit, window, self.block_size, num_tokens)
                settled = settled and fitting == limit
                limit = fitting
        return limit

    def publish(self, tables: Tables, index: int, key: bytes) -> bool:
        """Make block `index` findable in every group that has it; return whether it is new in any."""
        new = False
        for pool, table in zip(self.pools, tables, strict=True):
            if table[index] != NULL_BLOCK:
                new = pool.publish(table[index], key) or new
        return new

    def drop_passed(self, tables: Tables, position: int, *, all_before: bool = False) -> None:
        """Free the blocks that no token at `position` or later attends to.

        `position` is the first one that has not *completed*: steps in flight read no further back than that, which is
        why these blocks need not wait for them. Blocks are passed in order, so the search stops at the first one that
        is gone; `all_before` goes on to the start, for a table that a load has left with gaps.
        """
        if not self._slides:
            return
        for pool, window, table in zip(self.pools, self.windows, tables, strict=True):
            index = first_visible_block(position, window, self.block_size) - 1
            while index >= 0 and (all_before or table[index] != NULL_BLOCK):
                pool.free((table[index],))
                table[index] = NULL_BLOCK
                index -= 1

    def clear(self) -> None:
        for pool in self.pools:
            pool.clear()

    def first_position(self, num_blocks: int, num_tokens: int) -> int:
        return next_position(num_blocks, self.block_size, num_tokens)

    def check_integrity(self, owners: Iterable[Tables]) -> None:
        """Raise AssertionError unless `owners` are exactly the users of the blocks."""
        counts: list[Counter[int]] = [Counter() for _ in self.pools]
        for tables in owners:
            assert len({len(table) for table in tables}) <= 1, "tables of one sequence differ in length"
            for count, table in zip(counts, tables, strict=bool(tables)):
                count.update(block for block in table if block != NULL_BLOCK)
        for pool, count in zip(self.pools, counts, strict=True):
            pool.check_integrity(count)


def _tag(on_event: GroupEventSink | None, group: int) -> EventSink | None:
    if on_event is None:
        return None
    sink = on_event
    return lambda event: sink(group, event)


def _holder(table: list[int]) -> Callable[[int], bool]:
    return lambda index: table[index] != NULL_BLOCK
