"""The block pool of one KV group."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.blocks import BlockEvent, BlockPool


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def take(pool: BlockPool, count: int) -> list[int]:
    return [pool.allocate() for _ in range(count)]


def test_blocks_are_all_but_the_null_block() -> None:
    pool = BlockPool(5)
    assert sorted(take(pool, 4)) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 4)


def test_a_pool_needs_a_block_besides_the_null_block() -> None:
    with pytest.raises(ValueError, match="num_blocks=1"):
        BlockPool(1)


def test_a_freed_block_keeps_its_key_until_it_is_allocated_again() -> None:
    events: list[BlockEvent] = []
    pool = BlockPool(2, events.append)
    block = pool.allocate()
    assert pool.publish(block, key(1))
    pool.free([block])
    assert pool.find(key(1)) == block
    assert pool.allocate() == block
    assert pool.find(key(1)) is None
    assert events == [BlockEvent("stored", key(1)), BlockEvent("removed", key(1))]


def test_blocks_without_a_key_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached, plain, other = take(pool, 3)
    pool.publish(cached, key(1))
    pool.free([cached, plain])
    assert pool.allocate() == plain
    assert pool.allocate() == cached
    assert pool.num_free == 0
    assert pool.users(other) == 1


def test_the_tail_of_a_table_is_reused_first_when_it_is_freed_first() -> None:
    pool = BlockPool(4)
    table = take(pool, 3)
    for number, block in enumerate(table):
        pool.publish(block, key(number))
    pool.free(reversed(table))
    pool.allocate()
    assert [pool.find(key(number)) for number in range(3)] == [table[0], table[1], None]


def test_the_prefix_freed_longest_ago_is_reused_first() -> None:
    pool = BlockPool(3)
    old, new = take(pool, 2)
    pool.publish(old, key(1))
    pool.publish(new, key(2))
    pool.free([old])
    pool.free([new])
    pool.share(old)  # a hit makes it young again
    pool.free([old])
    assert pool.allocate() == new


def test_a_shared_block_is_free_when_its_last_user_leaves() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.publish(block, key(1))
    pool.share(block)
    pool.free([block])
    assert pool.num_used == 1
    pool.free([block])
    assert pool.num_used == 0
    pool.share(block)
    assert (pool.num_used, pool.users(block)) == (1, 1)


def test_a_second_block_with_the_same_key_stays_private() -> None:
    events: list[BlockEvent] = []
    pool = BlockPool(3, events.append)
    first, second = take(pool, 2)
    assert pool.publish(first, key(1))
    assert not pool.publish(second, key(1))
    assert pool.find(key(1)) == first
    assert pool.key_of(second) is None
    assert events == [BlockEvent("stored", key(1))]


def test_clear_forgets_keys_and_leaves_users_alone() -> None:
    events: list[BlockEvent] = []
    pool = BlockPool(3, events.append)
    block = pool.allocate()
    pool.publish(block, key(1))
    pool.clear()
    assert pool.find(key(1)) is None
    assert pool.users(block) == 1
    assert events[-1] == BlockEvent("cleared")
    pool.check_integrity({block: 1})


def test_freeing_twice_is_noticed() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.free([block])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block])


def test_the_integrity_check_notices_a_user_without_a_table() -> None:
    pool = BlockPool(3)
    pool.allocate()
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity({})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("asfp"), st.integers(0, 30)), max_size=120))
def test_books_agree_after_any_operations(operations: list[tuple[str, int]]) -> None:
    """Against a slow twin: users by counting, keys by a dictionary that drops a key when its block is allocated."""
    pool = BlockPool(7)
    users: Counter[int] = Counter()
    keys: dict[bytes, int] = {}
    for name, number in operations:
        held = sorted(users)
        if name == "a" and pool.num_free:
            block = pool.allocate()
            assert block not in users
            users[block] = 1
            keys = {k: b for k, b in keys.items() if b != block}
        elif name == "s" and keys:
            block = list(keys.values())[number % len(keys)]
            pool.share(block)
            users[block] += 1
        elif name == "f" and held:
            block = held[number % len(held)]
            pool.free([0, block])
            users[block] -= 1
            users += Counter()
        elif name == "p" and held and pool.key_of(held[number % len(held)]) is None:
            block = held[number % len(held)]
            assert pool.publish(block, key(number)) == (key(number) not in keys)
            keys.setdefault(key(number), block)
        pool.check_integrity(users)
        assert {k: pool.find(k) for k in keys} == keys
