"""The disk tier on disks that are full, read-only, failing, lying or hanging, and in processes that are killed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.disk.tier import DiskTier
from tests.support.failing_disks import NAMESPACED, built_faulty_io, can_mount
from tests.support.kv_objects import key_of
from tests.support.tier_contract import loaded, probe, soon
from tests.support.until import until

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
VICTIM = [sys.executable, "-m", "tests.support.disk_victim"]


def run_case(case: str, root: Path, *, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        [*prefix, *VICTIM, case, str(root)],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", ["full", "no_inodes", "watermark", "read_only", "undeletable"])
def test_file_systems_that_fail(case: str, tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("needs user and mount namespaces")
    run_case(case, tmp_path / "kv", prefix=tuple(NAMESPACED))


@pytest.fixture(scope="module")
def faulty_io(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_faulty_io(tmp_path_factory.mktemp("faulty"))


@pytest.mark.parametrize("case", ["failing_reads", "failing_writes", "short_io", "lying", "hanging"])
def test_disks_that_fail(case: str, faulty_io: Path, tmp_path: Path) -> None:
    run_case(case, tmp_path / "kv", env={"LD_PRELOAD": str(faulty_io), "FAULTS": str(tmp_path / "faults")})


def kill_at_random(root: Path, rng: random.Random, stored: set[int]) -> tuple[set[int], set[int]]:
    """Kill a process that saves and deletes while it does. Return which of its 200 objects must be there, given those
    that were before, and which may."""
    process = subprocess.Popen([*VICTIM, "killed", str(root)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(rng.randrange(1, 60))]
    time.sleep(rng.random() * 0.003)  # anywhere within an operation
    process.kill()
    lines += process.communicate()[0].splitlines()
    sure, unsure = set(stored), set[int]()
    for line in lines:
        verb, *words = line.split()
        numbers = {int(word) for word in words}
        match verb:
            case "saved":
                sure |= numbers
                unsure -= numbers
            case "save" | "delete":
                # What is saved while it is there stays there.
                unsure |= numbers if verb == "delete" else numbers - sure
                sure -= numbers if verb == "delete" else set()
    assert process.returncode == -9
    return sure, unsure


async def kill_and_look(root: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    stored: set[int] = set()
    for _ in range(rounds):
        sure, unsure = kill_at_random(root, rng, stored)
        tier = DiskTier(root, GIB, min_free_bytes=0)
        assert os.listdir(tier.place.incoming) == []
        await until(lambda tier=tier: not tier.stats().unindexed, "the walk ends")  # type: ignore[misc]
        held = tier.stats().objects
        found = dict(zip(range(200), loaded(tier, range(200)), strict=True))
        stored = {number for number, status in found.items() if status == "ok"}
        assert set(found.values()) <= {"ok", "miss"}
        assert sure <= stored <= sure | unsure
        assert held == len(stored) == sum(1 for _ in tier.place.objects.rglob("*.kvb"))
        assert probe(tier, [key_of(number) for number in sorted(stored)]) == len(stored)
        tier.close(soon())
        tier.check_integrity()


async def test_killed_processes_leave_whole_objects(tmp_path: Path) -> None:
    await kill_and_look(tmp_path / "kv", 4, seed=7)


@pytest.mark.soak
async def test_processes_killed_a_hundred_times(tmp_path: Path) -> None:
    await kill_and_look(tmp_path / "kv", 100, seed=8)
