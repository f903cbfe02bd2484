"""Programs for tests/kvstore/test_disk_faults.py: a disk tier in a process whose disk fails, or that is killed.

python -m tests.support.disk_victim CASE ROOT
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvstore.batch import Batch
from kvstore.disk import upkeep
from kvstore.disk.tier import READERS, DiskTier
from kvstore.tier import BreakerState, Deadline, Want
from tests.support.failing_disks import fault, mount, remount
from tests.support.kv_objects import key_of
from tests.support.tier_contract import SIZE, loaded, save, soon, statuses
from tests.support.until import until

GIB = 1 << 30


def spoil(tier: DiskTier, number: int) -> None:
    Path(tier.place.path_of(key_of(number))).write_bytes(b"x" * SIZE)


async def breaker_is(state: BreakerState, of: Callable[[], BreakerState]) -> None:
    await until(lambda: of() == state, f"the breaker is {state}")


async def save_until_ok(tier: DiskTier, number: int) -> None:
    """The breaker lets one piece through after its pause."""
    await until(lambda: statuses(save(tier, [number])) == ["ok"], "saving works again")


def killed(root: Path) -> None:
    """Save, load and delete until somebody ends it; say what can be relied on."""
    tier = DiskTier(root, GIB, min_free_bytes=0)
    rng = random.Random(os.getpid())
    print("ready", flush=True)
    while True:
        numbers = rng.sample(range(200), 4)
        print("save", *numbers, flush=True)
        assert statuses(save(tier, numbers)) == ["ok"] * 4
        print("saved", *numbers, flush=True)
        loaded(tier, rng.sample(range(200), 4))
        gone = rng.randrange(200)
        print("delete", gone, flush=True)
        tier.delete([key_of(gone)])


def full(root: Path) -> None:
    """The disk is full long before the capacity: what is stored later takes its room."""
    mount(root, f"size={30 * SIZE}")
    tier = DiskTier(root, GIB, min_free_bytes=0)
    for number in range(60):
        assert statuses(save(tier, [number])) == ["ok"]
    assert loaded(tier, [0, 59]) == ["miss", "ok"]
    tier.close(soon())
    tier.check_integrity()


async def no_inodes(root: Path) -> None:
    """The disk says that it is full when there seems to be room: ENOSPC in the middle of a save."""
    mount(root, "size=64m", "nr_inodes=60")
    tier = DiskTier(root, GIB, min_free_bytes=0)
    found = [statuses(save(tier, [number]))[0] for number in range(60)]
    assert set(found) <= {"ok", "failed", "refused"}
    assert "failed" in found
    await save_until_ok(tier, 100)
    assert set(loaded(tier, [*range(60), 100])) == {"ok", "miss"}
    assert os.listdir(tier.place.incoming) == []
    tier.close(soon())
    tier.check_integrity()


def watermark(root: Path) -> None:
    """Half of the disk is left to others, who may also take more."""
    mount(root, f"size={40 * SIZE}")
    tier = DiskTier(root, GIB, min_free_bytes=20 * SIZE)
    for number in range(60):
        assert statuses(save(tier, [number])) == ["ok"]
        assert free_bytes(root) >= 20 * SIZE
    assert 10 < tier.stats().objects <= 20
    (root / "others").write_bytes(bytes(15 * SIZE))
    assert statuses(save(tier, [100])) == ["ok"]
    assert free_bytes(root) >= 20 * SIZE
    assert loaded(tier, [100]) == ["ok"]
    tier.close(soon())
    tier.check_integrity()


def free_bytes(root: Path) -> int:
    status = os.statvfs(root)
    return status.f_bavail * status.f_frsize


async def read_only(root: Path) -> None:
    """Loads go on, saves are left alone after a few, and come back with the disk."""
    mount(root, "size=64m")
    tier = DiskTier(root, 10 * SIZE, min_free_bytes=0)
    assert statuses(save(tier, range(10))) == ["ok"] * 10
    await until(lambda: not tier.stats().unindexed, "the walk ends")
    spoil(tier, 3)
    remount(root, "ro")
    assert set(statuses(save(tier, range(20, 30)))) <= {"failed", "refused"}
    await until(lambda: statuses(save(tier, [30])) == ["refused"], "saves are not even tried")
    assert loaded(tier, range(10)) == ["ok"] * 3 + ["corrupt"] + ["ok"] * 6
    assert loaded(tier, range(3, 5)) == ["miss", "ok"]
    tier.delete([key_of(0)])
    assert loaded(tier, [0, 1]) == ["miss", "ok"]
    remount(root, "rw")
    await save_until_ok(tier, 20)
    await until(lambda: not os.path.exists(tier.place.path_of(key_of(0))), "the deletion is made up for")
    assert loaded(tier, [20]) == ["ok"]
    tier.close(soon())
    tier.check_integrity()


def undeletable(root: Path) -> None:
    """Files that cannot be deleted take space and nothing else."""
    mount(root, "size=64m")
    tier = DiskTier(root, 10 * SIZE, min_free_bytes=0)
    assert statuses(save(tier, range(10))) == ["ok"] * 10
    for number in range(3):
        path = tier.place.path_of(key_of(number))
        subprocess.run(["mount", "--bind", path, path], check=True)
    for number in range(20, 50):
        assert statuses(save(tier, [number])) == ["ok"]
    assert loaded(tier, range(10)) == ["ok"] * 3 + ["miss"] * 7
    assert loaded(tier, range(43, 50)) == ["ok"] * 7
    assert tier.stats().objects == 10
    tier.close(soon())
    tier.check_integrity()


async def failing_reads(root: Path) -> None:
    tier = DiskTier(root, GIB, min_free_bytes=0)
    assert statuses(save(tier, range(10))) == ["ok"] * 10
    fault("r")
    assert set(loaded(tier, range(10))) <= {"failed", "refused"}
    await breaker_is("open", lambda: tier.stats().load_breaker)
    assert statuses(save(tier, [20])) == ["ok"]
    fault("")
    await until(lambda: loaded(tier, [5]) == ["ok"], "loading works again")
    assert loaded(tier, range(10)) == ["ok"] * 10
    tier.close(soon())
    tier.check_integrity()


async def failing_writes(root: Path) -> None:
    tier = DiskTier(root, GIB, min_free_bytes=0)
    assert statuses(save(tier, range(10))) == ["ok"] * 10
    fault("w")
    assert set(statuses(save(tier, range(20, 30)))) <= {"failed", "refused"}
    await breaker_is("open", lambda: tier.stats().save_breaker)
    assert loaded(tier, [*range(10), *range(20, 30)]) == ["ok"] * 10 + ["miss"] * 10
    fault("")
    await save_until_ok(tier, 20)
    tier.close(soon())
    tier.check_integrity()
    assert os.listdir(tier.place.incoming) == []


def short_io(root: Path) -> None:
    tier = DiskTier(root, GIB, min_free_bytes=0)
    fault("s")
    assert statuses(save(tier, range(10))) == ["ok"] * 10
    assert loaded(tier, range(10)) == ["ok"] * 10
    fault("")
    assert loaded(tier, range(10)) == ["ok"] * 10
    tier.close(soon())


def lying(root: Path) -> None:
    tier = DiskTier(root, GIB, min_free_bytes=0)
    fault("l")
    assert statuses(save(tier, range(10))) == ["ok"] * 10
    fault("")
    assert loaded(tier, range(10)) == ["corrupt"] * 10
    assert loaded(tier, range(10)) == ["miss"] * 10
    tier.close(soon())
    tier.check_integrity()


async def hanging(root: Path) -> None:
    """Readers hang: what waits is given back at its deadline, what hangs when it ends, and the breaker opens."""
    tier = DiskTier(root, GIB, min_free_bytes=0)
    assert statuses(save(tier, range(10))) == ["ok"] * 10
    fault("h")
    batches: list[Batch] = []

    def begin_and_look() -> bool:
        # Again and again: on a busy machine a piece may be late before any reader gets to it.
        batches.append(Batch(1))
        want = Want(key_of(len(batches) % 10), memoryview(bytearray(SIZE)))
        tier.load([want], Deadline.after(0.1), batches[-1].report)
        return tier.stats().load_breaker == "open"

    await until(begin_and_look, "the breaker is open")
    await until(lambda: sum(not batch.settled for batch in batches) <= READERS, "what waited is reported")
    assert any(not batch.settled for batch in batches), "memory that is still read into was given back"
    assert {one.status for batch in batches for one in batch.outcomes if one} <= {"late", "refused"}
    assert statuses(save(tier, [20])) == ["ok"]
    fault("")
    assert all(batch.wait(soon()) for batch in batches)
    await until(lambda: loaded(tier, range(10)) == ["ok"] * 10, "loading works again")
    tier.close(soon())
    tier.check_integrity()


CASES = [
    full,
    no_inodes,
    watermark,
    read_only,
    undeletable,
    failing_reads,
    failing_writes,
    short_io,
    lying,
    hanging,
    killed,
]


if __name__ == "__main__":
    name, place = sys.argv[1:]
    upkeep.WATCH_S = 0.2  # what failed is tried again so often
    case = next(case for case in CASES if case.__name__ == name)
    result = case(Path(place))
    if asyncio.iscoroutine(result):
        asyncio.run(result)
