"""The disk tier on a real directory: what is kept over restarts, how much is kept, and what becomes of bad files."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.books import Quotas
from kvstore.disk.place import KEPT_CORRUPT, FoundObject, key_of_path
from kvstore.disk.tier import DiskTier
from kvstore.disk.upkeep import Upkeep
from kvstore.errors import TierUnusableError
from kvstore.keys import tenant_scope
from kvstore.ram.tier import RamTier
from kvstore.tier import Deadline, Tier, TierEvent
from tests.support.kv_objects import DIGEST, NAMESPACE, key_of, object_of
from tests.support.tier_contract import SIZE, TierContract, load, loaded, probe, save, soon, statuses
from tests.support.until import until

GIB = 1 << 30


@pytest.fixture
def events() -> list[TierEvent]:
    return []


@pytest.fixture(params=["direct", "buffered"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, events: list[TierEvent]) -> Iterator[DiskTier]:
    tier = DiskTier(
        tmp_path / "kv",
        GIB,
        min_free_bytes=0,
        on_event=events.append,
        direct=None if request.param == "direct" else False,
        sync=request.param == "buffered",
    )
    yield tier
    tier.close(soon())
    tier.check_integrity()
    assert not os.listdir(tier.place.incoming)


class TestContract(TierContract):
    pass


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def open_tier(root: Path, objects: int = 1000, **options: object) -> DiskTier:
    return DiskTier(root, objects * SIZE, min_free_bytes=0, **options)  # type: ignore[arg-type]


async def indexed(tier: DiskTier) -> None:
    await until(lambda: not tier.stats().unindexed, "the walk ends")


def files_of(tier: DiskTier) -> list[Path]:
    return sorted(tier.place.objects.rglob("*.kvb"))


async def test_objects_outlive_their_process(root: Path) -> None:
    first = open_tier(root)
    assert statuses(save(first, range(20))) == ["ok"] * 20
    first.close(soon())
    events: list[TierEvent] = []
    again = open_tier(root, on_event=events.append)
    assert loaded(again, range(20)) == ["ok"] * 20
    await indexed(again)
    assert again.stats().objects == 20
    assert {event.key for event in events} == {key_of(number) for number in range(20)}
    assert {event.kind for event in events} == {"stored"}
    again.close(soon())
    again.check_integrity()


async def test_before_the_walk_ends_the_disk_is_asked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_tier(root)
    assert statuses(save(first, range(4))) == ["ok"] * 4
    first.close(soon())
    monkeypatch.setattr("kvstore.disk.upkeep.Upkeep._index", lambda self: False)
    again = open_tier(root)
    assert again.stats().unindexed
    assert probe(again, [key_of(number) for number in range(6)]) == 4
    assert loaded(again, [0, 3, 4]) == ["ok", "ok", "miss"]
    again.delete([key_of(1)])
    assert loaded(again, [1]) == ["miss"]
    assert statuses(save(again, [2])) == ["ok"]
    again.close(soon())


async def test_what_was_used_last_is_kept_longest_over_a_restart(root: Path) -> None:
    first = open_tier(root)
    assert statuses(save(first, range(8))) == ["ok"] * 8
    for age, number in enumerate([3, 1, 7, 0, 2, 6, 5, 4]):
        os.utime(first.place.path_of(key_of(number)), (1e9 - age, 1e9 - age))
    first.close(soon())
    again = open_tier(root)
    await indexed(again)
    assert loaded(again, [4]) == ["ok"]  # the oldest; and from now on it is the newest
    again.close(soon())
    small = open_tier(root, objects=3)
    await indexed(small)
    await until(lambda: small.stats().objects == 3, "the limit is kept")
    assert loaded(small, range(8)) == ["miss", "ok", "miss", "ok", "ok", "miss", "miss", "miss"]
    small.close(soon())
    small.check_integrity()


def test_capacity_is_of_physical_bytes(root: Path) -> None:
    tier = open_tier(root, objects=10)
    for number in range(30):
        assert statuses(save(tier, [number])) == ["ok"]
        assert physical_bytes_of(tier) <= 10 * SIZE
    assert loaded(tier, range(30)) == ["miss"] * 20 + ["ok"] * 10
    stats = tier.stats()
    assert (stats.objects, stats.evictions_total) == (10, 20)
    assert stats.used_bytes == stats.evicted_bytes_total // 2 == physical_bytes_of(tier)
    tier.close(soon())
    tier.check_integrity()


def physical_bytes_of(tier: DiskTier) -> int:
    return sum(max(path.stat().st_blocks * 512, path.stat().st_size) for path in files_of(tier))


def test_free_space_is_left_to_others(root: Path) -> None:
    tier = DiskTier(root, GIB, min_free_bytes=1 << 60)
    assert statuses(save(tier, [1])) == ["refused"]
    assert tier.stats().save_breaker == "closed"
    assert files_of(tier) == []
    tier.close(soon())
    tier.check_integrity()


def test_an_owner_over_its_quota_loses_its_own(root: Path) -> None:
    scope = tenant_scope(b"k" * 32, "small")
    tier = open_tier(root, quotas=Quotas({key_of(0, scope=scope).owner: 2 * SIZE}))
    assert statuses(save(tier, range(5))) == ["ok"] * 5
    for number in range(5):
        assert statuses(save(tier, [number], scope=scope)) == ["ok"]
    assert len(files_of(tier)) == 7
    assert loaded(tier, range(5)) == ["ok"] * 5
    tier.set_quota(key_of(0, scope=scope).owner, SIZE - 1)
    assert statuses(save(tier, [9], scope=scope)) == ["refused"]
    tier.close(soon())
    tier.check_integrity()


def test_pinned_objects_stay(root: Path) -> None:
    tier = open_tier(root, objects=10)
    assert statuses(save(tier, range(3))) == ["ok"] * 3
    assert tier.pin([key_of(0), key_of(1), key_of(77)], seconds=1e6) == 2
    for number in range(10, 30):
        assert statuses(save(tier, [number])) == ["ok"]
    assert loaded(tier, [0, 1, 2]) == ["ok", "ok", "miss"]
    assert tier.stats().pinned_bytes == 2 * SIZE
    tier.close(soon())


def test_nobody_else_can_read(root: Path) -> None:
    old = os.umask(0)
    try:
        tier = open_tier(root)
        assert statuses(save(tier, [1])) == ["ok"]
        tier.describe(NAMESPACE)
        tier.close(soon())
    finally:
        os.umask(old)
    modes = {stat.S_IMODE(path.stat().st_mode): path for path in root.rglob("*") if path.is_file()}
    assert set(modes) == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")] if path.is_dir()} == {0o700}
    described = tier.place.objects / DIGEST.hex() / "namespace.json"
    assert '"weights_digest"' in described.read_text()


def test_bad_files_are_set_aside_counted_and_never_served(root: Path) -> None:
    tier = open_tier(root)
    numbers = range(KEPT_CORRUPT + 4)
    assert statuses(save(tier, numbers)) == ["ok"] * len(numbers)
    for number in numbers:
        path = Path(tier.place.path_of(key_of(number)))
        data = bytearray(path.read_bytes())
        match number % 4:
            case 0:
                data[-1] ^= 0x80
            case 1:
                data = data[: SIZE // 2]
            case 2:
                data = object_of(number + 1)
            case 3:
                data = bytearray()
        path.write_bytes(data)
    assert loaded(tier, numbers) == ["corrupt"] * len(numbers)
    assert loaded(tier, numbers) == ["miss"] * len(numbers)
    assert tier.stats().corrupt == {"payload": 3, "short": 6, "identity": 3}
    assert tier.stats().load_breaker == "closed"
    assert files_of(tier) == []
    assert len(os.listdir(tier.place.corrupt)) == KEPT_CORRUPT
    assert statuses(save(tier, numbers)) == ["ok"] * len(numbers)
    assert loaded(tier, numbers) == ["ok"] * len(numbers)
    tier.close(soon())
    tier.check_integrity()


def replace_by_link(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


async def test_what_is_not_ours_is_left_alone(root: Path, tmp_path: Path) -> None:
    first = open_tier(root)
    assert statuses(save(first, [1, 2])) == ["ok", "ok"]
    first.close(soon())
    secret = tmp_path / "secret"
    content = object_of(2)
    secret.write_bytes(content)
    path = Path(first.place.path_of(key_of(2)))
    replace_by_link(path, secret)
    strangers = [first.place.objects / "note.txt", path.parent / "x.kvb", path.parent / (path.name + ".bak")]
    for stranger in strangers:
        stranger.write_text("not ours")
    again = open_tier(root)
    await indexed(again)
    assert again.stats().objects == 1
    assert loaded(again, [1, 2]) == ["ok", "miss"]
    again.close(soon())
    assert all(one.read_text() == "not ours" for one in strangers)
    assert secret.read_bytes() == content


@pytest.mark.parametrize("how", ["delete", "drop", "missing"])
async def test_what_goes_during_the_walk_is_not_entered(root: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The walk may have seen a file before it was deleted; to believe it would lose what is saved later."""
    first = open_tier(root)
    assert statuses(save(first, range(3))) == ["ok"] * 3
    first.close(soon())
    seen, go_on = threading.Event(), threading.Event()

    def slow_find(upkeep: Upkeep) -> list[FoundObject]:
        found = list(upkeep._place.walk())
        seen.set()
        assert go_on.wait(30)
        return found

    monkeypatch.setattr(Upkeep, "_find", slow_find)
    again = open_tier(root)
    assert seen.wait(30)
    path = again.place.path_of(key_of(1))
    if how == "delete":
        again.delete([key_of(1)])
    elif how == "drop":
        again.drop(DIGEST)
    else:
        os.unlink(path)
    assert loaded(again, [1]) == ["miss"]
    await until(lambda: not os.path.exists(path), "the file is gone")
    assert again._held.wait_settled(key_of(1), soon())
    go_on.set()
    await indexed(again)
    assert again.stats().objects == (0 if how == "drop" else 2)
    assert statuses(save(again, [1])) == ["ok"]
    assert loaded(again, [1]) == ["ok"]
    again.close(soon())
    again.check_integrity()


async def test_leftovers_of_the_dead_are_cleared(root: Path) -> None:
    first = open_tier(root)
    assert statuses(save(first, [1])) == ["ok"]
    first.close(soon())
    (first.place.incoming / "123-abc").write_bytes(b"half")
    (first.place.doomed / "tree" / "aa").mkdir(parents=True)
    (first.place.doomed / "tree" / "aa" / "file").write_bytes(b"x")
    again = open_tier(root)
    assert os.listdir(again.place.incoming) == []
    again.drop(bytes(32))
    await until(lambda: not os.listdir(again.place.doomed), "what was doomed is deleted")
    assert loaded(again, [1]) == ["ok"]
    again.close(soon())


async def test_dropped_objects_do_not_come_back(root: Path) -> None:
    scope = tenant_scope(b"k" * 32, "a")
    first = open_tier(root)
    assert statuses(save(first, range(5))) == ["ok"] * 5
    assert statuses(save(first, range(5), scope=scope)) == ["ok"] * 5
    first.drop(owner=key_of(0, scope=scope).owner)
    first.close(soon())
    again = open_tier(root)
    await indexed(again)
    assert again.stats().objects == 5
    assert loaded(again, range(5)) == ["ok"] * 5
    batch, _ = load(again, [key_of(0, scope=scope)])
    assert statuses(batch) == ["miss"]
    again.close(soon())


def test_one_process_at_a_time_unless_it_is_shared(root: Path) -> None:
    first = open_tier(root)
    with pytest.raises(TierUnusableError, match="in use"):
        open_tier(root)
    first.close(soon())
    second = open_tier(root)
    second.close(soon())


async def test_sharers_find_each_others_objects_and_one_evicts(root: Path) -> None:
    tiers = [open_tier(root, objects=10, shared=True) for _ in range(2)]
    await indexed(tiers[0])
    assert {tier.name for tier in tiers} == {"remote"}
    assert statuses(save(tiers[1], range(6))) == ["ok"] * 6
    assert probe(tiers[0], [key_of(number) for number in range(7)]) == 6
    assert loaded(tiers[0], range(6)) == ["ok"] * 6
    tiers[0].delete([key_of(5)])
    await until(lambda: not os.path.exists(tiers[0].place.path_of(key_of(5))), "it is deleted")
    assert loaded(tiers[1], [4, 5]) == ["ok", "miss"]
    assert tiers[1].stats().evictions_total == 0
    for tier in tiers:
        tier.close(soon())


@pytest.mark.parametrize("kind", ["file", "relative"])
def test_a_root_that_cannot_be_used_is_told(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "taken"
    root.write_text("a file")
    with pytest.raises(TierUnusableError, match="taken"):
        open_tier(root if kind == "file" else root / "below")


def test_too_much_that_waits_is_refused(root: Path) -> None:
    tier = DiskTier(root, GIB, min_free_bytes=0, max_queued_bytes=SIZE, writers=0)
    batch = save(tier, range(3))
    assert [outcome.status for outcome in batch.outcomes if outcome] == ["refused", "refused"]
    assert tier.stats().queued_bytes == SIZE
    tier.close(Deadline.after(0))
    assert statuses(batch) == ["cancelled", "refused", "refused"]


async def test_what_nobody_gets_to_is_late(root: Path) -> None:
    """As when all threads hang in the disk: the queue's memory is given back at the deadline."""
    tier = DiskTier(root, GIB, min_free_bytes=0, writers=0, readers=0)
    batch = save(tier, [1], Deadline.after(0.01))
    assert statuses(batch) == ["late"]
    tier.close(soon())


def test_tiers_leave_no_descriptors_and_threads(root: Path) -> None:
    def open_and_use() -> tuple[int, int]:
        ram = RamTier(64 * SIZE, slab_bytes=64 * SIZE)
        disk = open_tier(root)
        tiers: list[Tier] = [ram, disk]
        for tier in tiers:
            assert statuses(save(tier, range(4))) == ["ok"] * 4
            assert loaded(tier, range(4)) == ["ok"] * 4
            tier.close(soon())
        return len(os.listdir("/proc/self/fd")), sum(one.name.startswith("kv-disk") for one in threading.enumerate())

    first = open_and_use()
    assert [open_and_use() for _ in range(3)] == [first] * 3
    assert first[1] == 0


def test_paths_lead_back_to_keys(root: Path) -> None:
    tier = open_tier(root)
    path = tier.place.path_of(key_of(4))
    assert key_of_path(path) == key_of(4)
    for wrong in [path + ".bak", path.replace(".kvb", ""), path.replace("/" + key_of(4).leaf[:2] + "/", "/zz/")]:
        with pytest.raises(ValueError, match="object"):
            key_of_path(wrong)
    tier.close(soon())
