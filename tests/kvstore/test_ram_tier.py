"""The RAM tier: its slabs, leases that keep memory, room that is made, and memory that another process maps."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvstore.block_format import check, seal
from kvstore.books import Quotas
from kvstore.errors import CorruptObjectError, TierUnusableError
from kvstore.keys import tenant_scope
from kvstore.object_key import ObjectKey
from kvstore.ram.arena import Arena
from kvstore.ram.slabs import PAGE_BYTES, Slabs, class_bytes
from kvstore.ram.tier import RamTier
from kvstore.tier import TierEvent
from tests.support.kv_objects import PART, identity_of, key_of, object_of, payload_of
from tests.support.tier_contract import SIZE, TierContract, load, loaded, probe, save, soon, statuses

SLOTS = 8
SLAB = SLOTS * class_bytes(SIZE)


@pytest.fixture
def events() -> list[TierEvent]:
    return []


@pytest.fixture
def tier(events: list[TierEvent]) -> Iterator[RamTier]:
    tier = RamTier(8 * SLAB, on_event=events.append, slab_bytes=SLAB)
    yield tier
    tier.check_integrity()
    tier.close(soon())


class TestContract(TierContract):
    pass


def small_tier(slabs: int = 1, quotas: Quotas | None = None) -> RamTier:
    return RamTier(slabs * SLAB, slab_bytes=SLAB, quotas=quotas)


def put(tier: RamTier, number: int) -> None:
    slot = tier.reserve(key_of(number), SIZE)
    assert slot is not None
    slot.view[PART.header_bytes :] = payload_of(number)
    seal(slot.view, identity_of(number), PART)
    slot.publish()


@pytest.mark.parametrize("seed", range(3))
def test_slots_never_overlap_and_none_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    slabs = Slabs(20 * (1 << 20) + 5000, 1 << 20)
    used: dict[int, int] = {}
    for step in range(2_000):
        size = rng.choice([100, 4096, 50_000, 300_000, 1 << 20])
        offset = slabs.allocate(class_bytes(size)) if rng.random() < 0.55 else None
        if offset is not None:
            assert offset % PAGE_BYTES == 0
            assert offset in slabs.neighbours(offset)
            used[offset] = size
        elif used:
            gone = rng.choice(sorted(used))
            slabs.free(gone)
            del used[gone]
        if step % 20 == 0:
            slabs.check_integrity(used)
    for offset in used:
        slabs.free(offset)
    slabs.check_integrity({})


def test_size_classes_waste_little() -> None:
    for size in [1, 4095, 4096, 4097, 65_537, 987_136, 1 << 20, (1 << 20) + 4096, 3_000_000]:
        assert class_bytes(size) % PAGE_BYTES == 0
        assert size <= class_bytes(size) <= max(size * 17 / 16 + 1, size + PAGE_BYTES)
    assert class_bytes((1 << 20) + 4096) < 1.07 * (1 << 20)


def test_what_is_reserved_is_not_found_until_it_is_published(tier: RamTier, events: list[TierEvent]) -> None:
    slot = tier.reserve(key_of(1), SIZE)
    assert slot is not None
    assert probe(tier, [key_of(1)]) == 0
    assert tier.lease(key_of(1), "me") is None
    slot.abandon()
    assert events == []
    put(tier, 1)
    assert events == [TierEvent("stored", key_of(1))]
    with pytest.raises(AssertionError, match="twice"):
        slot.publish()


def test_the_first_of_two_writers_stays(tier: RamTier) -> None:
    first, second = tier.reserve(key_of(1), SIZE), tier.reserve(key_of(1), SIZE)
    assert first is not None
    assert second is not None
    for slot in (first, second):
        slot.view[:] = object_of(1)
    one, two = first.publish("a"), second.publish("b")
    assert one is not None
    assert two is not None
    check(two.view, key_of(1))
    one.release()
    two.release()
    assert tier.stats().objects == 1


def test_a_readers_memory_is_never_reused() -> None:
    """Neither eviction nor deletion takes it, and the last of several readers gives it back."""
    tier = small_tier()
    for number in range(SLOTS):
        put(tier, number)
    leases = [lease for _ in range(2) if (lease := tier.lease(key_of(3), "reader")) is not None]
    tier.delete([key_of(3)])
    assert tier.lease(key_of(3), "late") is None
    for number in range(100, 100 + 3 * SLOTS):
        put(tier, number)
        check(leases[0].view, key_of(3))
        tier.check_integrity()
    assert tier.stats().objects == SLOTS - 1
    for lease in leases:
        assert tier.stats().objects == SLOTS - 1
        lease.release()
    put(tier, 200)
    assert tier.stats().objects == SLOTS
    with pytest.raises(AssertionError, match="released twice"):
        leases[0].release()


def test_with_everything_in_use_there_is_no_room() -> None:
    tier = small_tier()
    for number in range(SLOTS):
        put(tier, number)
    leases = [tier.lease(key_of(number), f"reader {number}") for number in range(SLOTS)]
    assert tier.reserve(key_of(99), SIZE) is None
    assert statuses(save(tier, [99])) == ["refused"]
    assert sorted(holder for holder, _ in tier.overdue(0)) == [f"reader {number}" for number in range(SLOTS)]
    assert tier.overdue(1e9) == []
    for lease in leases:
        assert lease is not None
        lease.release()
    put(tier, 99)
    assert loaded(tier, [0, 99]) == ["miss", "ok"]
    assert tier.stats().evictions_total == 1


def test_views_are_read_only(tier: RamTier) -> None:
    put(tier, 1)
    lease = tier.lease(key_of(1), "me")
    assert lease is not None
    with lease, pytest.raises(TypeError):
        lease.view[0] = 0


def test_another_size_takes_a_whole_slab_and_spares_those_in_use() -> None:
    tier = small_tier(slabs=2)
    for number in range(2 * SLOTS):
        put(tier, number)
    lease = tier.lease(key_of(0), "reader")
    assert lease is not None
    large = tier.reserve(key_of(50), SLAB)
    assert large is not None
    assert tier.stats().objects == SLOTS
    assert tier.reserve(key_of(51), SLAB) is None
    check(lease.view, key_of(0))
    lease.release()
    large.abandon()
    assert tier.reserve(key_of(50), SLAB + 1) is None
    tier.check_integrity()


def test_quotas_hold_in_bytes() -> None:
    scope = tenant_scope(b"k" * 32, "small")
    owner = key_of(0, scope=scope).owner
    tier = small_tier(slabs=2, quotas=Quotas({owner: 3 * class_bytes(SIZE)}))
    for number in range(4):
        put(tier, number)
    assert statuses(save(tier, range(10), scope=scope)) == ["ok"] * 10
    keys = [key_of(number, scope=scope) for number in range(10)]
    assert [tier.held(key) for key in keys] == [False] * 7 + [True] * 3
    assert loaded(tier, range(4)) == ["ok"] * 4
    tier.set_quota(owner, class_bytes(SIZE) - 1)
    assert statuses(save(tier, [20], scope=scope)) == ["refused"]
    tier.check_integrity()


def test_bytes_that_change_in_memory_are_found_out(tier: RamTier) -> None:
    put(tier, 1)
    with open(tier.arena.path, "rb") as peer:
        offset = peer.read().index(object_of(1)[PART.header_bytes :])
    tier.arena.view(offset, 1)[0] ^= 4
    assert loaded(tier, [1]) == ["corrupt"]
    assert loaded(tier, [1]) == ["miss"]
    assert tier.stats().corrupt == {"payload": 1}


def test_targets_of_a_wrong_size_are_left_alone(tier: RamTier) -> None:
    put(tier, 1)
    slot = tier.reserve(key_of(2), SIZE + 4096)
    assert slot is not None
    slot.view[:SIZE] = object_of(2)
    slot.publish()
    batch, targets = load(tier, [key_of(2)])
    assert statuses(batch) == ["failed"]
    assert targets[0] == b"\xee" * SIZE


PEER = """
import os, sys
from kvstore.block_format import check
from kvstore.object_key import ObjectKey
from kvstore.ram.arena import map_arena
fd = int(sys.argv[1]) if sys.argv[1].isdigit() else os.open(sys.argv[1], os.O_RDONLY)
memory = map_arena(fd)
os.close(fd)
for name, offset in zip(sys.argv[3::2], sys.argv[4::2]):
    check(memory[int(offset) : int(offset) + int(sys.argv[2])], ObjectKey.parse(name))
print(memory.readonly, len(memory))
"""


@pytest.mark.parametrize("how", ["inherited", "path"])
def test_another_process_maps_the_arena(tier: RamTier, how: str) -> None:
    places = []
    for number in range(3):
        put(tier, number)
        places.append(memory_offset(tier, number))
    arguments = [text for number, at in enumerate(places) for text in (key_of(number).name, str(at))]
    where = str(tier.arena.fd) if how == "inherited" else tier.arena.path
    done = subprocess.run(
        [sys.executable, "-c", PEER, where, str(SIZE), *arguments],
        pass_fds=(tier.arena.fd,) if how == "inherited" else (),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["True", str(tier.arena.capacity_bytes)], done.stderr


def memory_offset(tier: RamTier, number: int) -> int:
    lease = tier.lease(key_of(number), "offset")
    assert lease is not None
    with lease:
        return lease.offset


def test_nobody_can_shrink_or_write_the_arena() -> None:
    arena = Arena(1 << 16)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, 1 << 16)
    arena.close()


def test_an_arena_that_is_too_large_is_told() -> None:
    with pytest.raises(TierUnusableError, match="shared memory"):
        Arena(1 << 62)


def test_views_outlive_the_tier() -> None:
    tier = small_tier()
    put(tier, 1)
    lease = tier.lease(key_of(1), "me")
    slot = tier.reserve(key_of(2), SIZE)
    assert lease is not None
    assert slot is not None
    tier.close(soon())
    check(lease.view, key_of(1))
    assert tier.lease(key_of(1), "late") is None
    assert tier.reserve(key_of(3), SIZE) is None
    lease.release()
    assert slot.publish("me") is None


def test_readers_and_writers_in_a_storm_see_only_whole_objects() -> None:
    """More keys than slots: readers check leased memory while writers evict, delete and drop around them."""
    tier = small_tier(slabs=2)
    stop, failures = threading.Event(), list[BaseException]()

    def read(me: int) -> None:
        rng = random.Random(me)
        while not stop.is_set():
            key: ObjectKey = key_of(rng.randrange(40))
            lease = tier.lease(key, f"reader {me}")
            if lease is None:
                continue
            with lease:
                try:
                    check(lease.view, key)
                except CorruptObjectError as error:
                    failures.append(error)
                    return

    def write(me: int) -> None:
        rng = random.Random(100 + me)
        for step in range(400):
            number = rng.randrange(40)
            slot = tier.reserve(key_of(number), SIZE)
            if slot is not None:
                slot.view[:] = objects[number]
                slot.publish() if rng.random() < 0.9 else slot.abandon()
            if step % 7 == 0:
                tier.delete([key_of(rng.randrange(40))])
            if step % 100 == 0:
                tier.drop()

    objects = [object_of(number) for number in range(40)]
    readers = [threading.Thread(target=read, args=(me,)) for me in range(3)]
    writers = [threading.Thread(target=write, args=(me,)) for me in range(2)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert failures == []
    tier.check_integrity()
    assert tier.overdue(0) == []
