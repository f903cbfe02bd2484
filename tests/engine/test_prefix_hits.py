"""How far a hit reaches over KV groups."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.blocks import BlockPool
from engine.kv.prefix import first_visible_block, fit_window, longest_hit

BLOCK = 4


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def pool_with(indices: list[int], size: int = 40) -> BlockPool:
    pool = BlockPool(size)
    for index in indices:
        pool.publish(pool.allocate(), key(index))
    return pool


KEYS = [key(index) for index in range(10)]


def test_a_hit_of_full_attention_is_the_unbroken_prefix() -> None:
    hit = longest_hit([pool_with([0, 1, 3])], [None], KEYS, BLOCK, 100)
    assert hit.num_blocks == 2
    assert all(block > 0 for block in hit.tables[0])


def test_a_hit_is_never_longer_than_the_sequence() -> None:
    hit = longest_hit([pool_with(list(range(10)))], [None], KEYS, BLOCK, 11)
    assert hit.num_blocks == 2


def test_a_sliding_window_needs_only_the_blocks_before_the_hit_point() -> None:
    pool = pool_with([4, 5])
    hit = longest_hit([pool], [5], KEYS[:6], BLOCK, 100)  # position 24 sees 20..24: block 5
    assert hit.num_blocks == 6
    assert hit.tables[0] == [0, 0, 0, 0, 0, pool.find(key(5))]


def test_a_full_hit_computes_its_last_token_again_and_that_sees_one_token_more() -> None:
    # 24 tokens in 6 blocks: position 23 sees 19..23, which begins in block 4.
    assert longest_hit([pool_with([5])], [5], KEYS[:6], BLOCK, 25).num_blocks == 6
    assert longest_hit([pool_with([5])], [5], KEYS[:6], BLOCK, 24).num_blocks == 0
    assert longest_hit([pool_with([4, 5])], [5], KEYS[:6], BLOCK, 24).num_blocks == 6


def test_the_hit_is_the_minimum_over_groups() -> None:
    full, sliding = pool_with(list(range(8))), pool_with([2, 3, 7])
    hit = longest_hit([full, sliding], [None, 8], KEYS, BLOCK, 100)
    # 8 blocks would need sliding blocks 6 and 7; 4 blocks need 2 and 3.
    assert hit.num_blocks == 4
    assert hit.tables[1][:2] == [0, 0]
    assert [len(table) for table in hit.tables] == [4, 4]


def test_nothing_cached_is_an_empty_hit() -> None:
    hit = longest_hit([pool_with([]), pool_with([])], [None, 8], KEYS, BLOCK, 100)
    assert hit.num_blocks == 0
    assert hit.tables == ([], [])


@settings(max_examples=200, deadline=None)
@given(
    st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.integers(1, 30), st.integers(1, 30), st.integers(1, 50)
)
def test_the_hit_equals_trying_every_length(
    first: set[int], second: set[int], window: int, other_window: int, num_tokens: int
) -> None:
    def usable(cached: set[int], width: int | None, blocks: int) -> bool:
        position = min(blocks * BLOCK, num_tokens - 1)
        visible = range(0 if width is None else max(0, position - width + 1), blocks * BLOCK)
        return all(token // BLOCK in cached for token in visible)

    for widths in product((None, window), (None, other_window)):
        expected = max(
            blocks
            for blocks in range(min(10, num_tokens // BLOCK) + 1)
            if blocks == 0 or (usable(first, widths[0], blocks) and usable(second, widths[1], blocks))
        )
        pools = [pool_with(sorted(first)), pool_with(sorted(second))]
        hit = longest_hit(pools, widths, KEYS, BLOCK, num_tokens)
        assert hit.num_blocks == expected


def test_the_first_visible_block_holds_the_windows_first_token() -> None:
    assert first_visible_block(10, None, BLOCK) == 0
    assert first_visible_block(3, 8, BLOCK) == 0
    assert first_visible_block(11, 8, BLOCK) == 1  # sees 4..11
    assert first_visible_block(12, 8, BLOCK) == 1  # sees 5..12
    assert first_visible_block(15, 8, BLOCK) == 2  # sees 8..15


def test_each_block_is_looked_at_once() -> None:
    looked: list[int] = []

    def has(index: int) -> bool:
        looked.append(index)
        return index % 2 == 0

    assert fit_window(has, 100, 8, BLOCK, 1000) == 0 or looked
    assert len(looked) == len(set(looked))
