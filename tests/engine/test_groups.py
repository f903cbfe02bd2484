"""Block tables over several KV groups: all groups change, or none."""

from __future__ import annotations

import pytest

from engine.kv.groups import KVGroups
from engine.kv.prefix import PrefixHit
from engine.protocol import KVGroupSpec

FULL = KVGroupSpec()
SLIDING = KVGroupSpec(kind="sliding_window", window_tokens=8)
NO_HIT = PrefixHit(0, ([], []))


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def make(blocks: tuple[int, int] = (21, 21)) -> KVGroups:
    return KVGroups([FULL, SLIDING], blocks, block_size=4)


def test_a_pool_per_group_is_required() -> None:
    with pytest.raises(ValueError, match="1 block counts"):
        KVGroups([FULL, SLIDING], [9], 4)


def test_extension_takes_from_every_group() -> None:
    kv = make()
    tables = kv.adopt(NO_HIT, 2)
    assert kv.extend(tables, 5)
    assert [len(table) for table in tables] == [5, 5]
    assert kv.blocks_used == 10
    kv.check_integrity([tables])


def test_extension_takes_nothing_when_one_group_is_short() -> None:
    kv = make((21, 4))
    tables = kv.adopt(NO_HIT, 2)
    before = kv.blocks_used
    assert not kv.extend(tables, 4)
    assert kv.blocks_used == before
    assert [len(table) for table in tables] == [2, 2]
    kv.check_integrity([tables])


def test_release_gives_everything_back() -> None:
    kv = make()
    tables = kv.adopt(NO_HIT, 5)
    kv.release(tables)
    assert kv.blocks_used == 0
    kv.check_integrity([])


def test_blocks_behind_the_window_are_freed_and_their_places_kept() -> None:
    kv = make()
    tables = kv.adopt(NO_HIT, 5)
    kv.drop_passed(tables, 15)  # sees 8..15
    assert tables[1][:2] == [0, 0]
    assert all(block > 0 for block in tables[1][2:])
    assert all(block > 0 for block in tables[0])
    assert kv.pools[1].num_used == 3
    kv.drop_passed(tables, 19)
    assert tables[1][:3] == [0, 0, 0]
    kv.check_integrity([tables])


def test_dropping_behind_a_gap_reaches_the_start_when_asked() -> None:
    kv = make()
    tables = kv.adopt(NO_HIT, 1)
    tables = [[*tables[0], *(kv.pools[0].allocate() for _ in range(4))], [tables[1][0], 0, 0, 0]]
    tables[1].append(kv.pools[1].allocate())
    kv.drop_passed(tables, 20)
    assert tables[1][0] > 0
    kv.drop_passed(tables, 20, all_before=True)
    assert tables[1][0] == 0
    kv.check_integrity([tables])


def test_a_hit_is_shared_and_counts_against_the_room() -> None:
    kv = make((5, 5))
    tables = kv.adopt(NO_HIT, 2)
    for index in range(2):
        assert kv.publish(tables, index, key(index))
    kv.release(tables)
    hit = kv.match([key(0), key(1)], 20)
    assert hit.num_blocks == 2
    assert kv.room() == 4
    assert kv.room(hit) == 2  # the hit's blocks are free, and about to be used
    adopted = kv.adopt(hit, 4)
    assert kv.room() == 0
    assert adopted[0][:2] == hit.tables[0]
    kv.check_integrity([adopted])


def test_fresh_blocks_out_of_the_window_are_not_taken() -> None:
    kv = make()
    tables = kv.adopt(NO_HIT, 5, first_position=20)  # sees 13..20
    assert tables[1][:3] == [0, 0, 0]
    assert all(block > 0 for block in tables[1][3:])
    assert kv.pools[0].num_used == 5
    assert kv.usable_blocks(tables, 5, 100) == 5
    assert kv.usable_blocks(tables, 4, 100) == 0  # position 16 sees 9..16, from block 2 on


def test_the_watermark_is_a_hundredth_of_each_pool() -> None:
    kv = make((301, 1001))
    assert kv.room() == 300
    assert kv.room(above_watermark=True) == 297


def test_publishing_skips_groups_that_have_dropped_the_block() -> None:
    kv = make()
    tables = kv.adopt(NO_HIT, 5)
    kv.drop_passed(tables, 15)
    assert kv.publish(tables, 0, key(0))
    assert kv.pools[0].find(key(0)) == tables[0][0]
    assert kv.pools[1].find(key(0)) is None
    assert not kv.publish(tables, 0, key(0))


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [((11, 4), 40), ((11, 3), 8), ((3, 21), 8)],
    ids=["window fits", "window does not fit", "full attention bounds"],
)
def test_the_longest_sequence_alone(blocks: tuple[int, int], expected: int) -> None:
    assert make(blocks).max_sequence_tokens == expected


def test_a_sliding_window_alone_bounds_no_sequence() -> None:
    assert KVGroups([SLIDING], [4], 4).max_sequence_tokens is None


def test_events_name_their_group() -> None:
    events: list[tuple[int, str]] = []
    kv = KVGroups([FULL, SLIDING], [9, 9], 4, lambda group, event: events.append((group, event.kind)))
    tables = kv.adopt(NO_HIT, 1)
    kv.publish(tables, 0, key(0))
    kv.clear()
    assert events == [(0, "stored"), (1, "stored"), (0, "cleared"), (1, "cleared")]
