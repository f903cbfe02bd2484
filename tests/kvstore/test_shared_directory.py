"""A directory that several processes share: all find what any has saved, and one of them counts and evicts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.disk import upkeep
from kvstore.disk.place import Place
from kvstore.disk.tier import DiskTier
from kvstore.keys import tenant_scope
from kvstore.tier import TierEvent
from tests.support.kv_objects import DIGEST, key_of
from tests.support.tier_contract import SIZE, TierContract, load, loaded, probe, save, soon, statuses
from tests.support.until import until

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


def open_shared(root: Path, objects: int = 1000, **options: object) -> DiskTier:
    return DiskTier(root, objects * SIZE, min_free_bytes=0, shared=True, **options)  # type: ignore[arg-type]


@pytest.fixture
def events() -> list[TierEvent]:
    return []


@pytest.fixture(params=["owner", "guest"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, events: list[TierEvent]) -> Iterator[DiskTier]:
    """The one that counts and evicts, and one beside it."""
    owner = open_shared(tmp_path / "kv", on_event=events.append if request.param == "owner" else None)
    guest = open_shared(tmp_path / "kv", on_event=events.append) if request.param == "guest" else None
    yield guest or owner
    for one in (guest, owner):
        if one is not None:
            one.close(soon())
            one.check_integrity()


class TestContract(TierContract):
    pass


class Sharer:
    """Another process with a tier of its own over the directory."""

    def __init__(self, root: Path, objects: int) -> None:
        command = [sys.executable, "-m", "tests.support.directory_sharer", str(root), str(objects)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._line() == "ready"

    def ask(self, *words: object) -> list[str]:
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        return self._line().split()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def sharer(root: Path, objects: int) -> Iterator[Sharer]:
    process = Sharer(root, objects)
    try:
        yield process
    finally:
        process.kill()


async def test_processes_find_each_others_objects_and_the_owner_evicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "LOCK_RETRY_S", 0.05)
    monkeypatch.setattr(upkeep, "REWALK_S", 0.05)
    with sharer(tmp_path / "kv", objects=12) as owner:
        tier = open_shared(tmp_path / "kv", objects=12)
        assert owner.ask("save", 0, 6) == ["ok"] * 6
        assert loaded(tier, range(7)) == ["ok"] * 6 + ["miss"]
        assert probe(tier, [key_of(number) for number in range(7)]) == 6
        assert statuses(save(tier, range(10, 20))) == ["ok"] * 10
        # The owner learns of them and keeps the limit, and nobody else deletes anything.
        await until(lambda: owner.ask("stats") == ["12", "4"], "the owner evicts what is too much")
        assert len(list(tier.place.objects.rglob("*.kvb"))) == 12
        assert tier.stats().evictions_total == 0
        assert owner.ask("load", 10, 20).count("ok") == loaded(tier, range(10, 20)).count("ok")
        # It dies, and another one takes its place.
        owner.kill()
        await until(lambda: not tier.stats().unindexed, "the directory has another owner")
        await until(lambda: statuses(save(tier, range(30, 50))).count("ok") == 20, "it makes room")
        assert len(list(tier.place.objects.rglob("*.kvb"))) <= 12
        assert tier.stats().evictions_total > 0
        tier.close(soon())
        tier.check_integrity()


async def test_what_a_guest_drops_or_deletes_is_gone_for_all(tmp_path: Path) -> None:
    scope = tenant_scope(b"k" * 32, "a")
    with sharer(tmp_path / "kv", objects=100) as owner:
        guest = open_shared(tmp_path / "kv", objects=100)
        assert statuses(save(guest, range(4), scope=scope)) == ["ok"] * 4
        assert owner.ask("save", 0, 4) == ["ok"] * 4
        guest.drop(DIGEST, key_of(0, scope=scope).owner)
        batch, _ = load(guest, [key_of(0, scope=scope)])
        assert statuses(batch) == ["miss"]
        guest.delete([key_of(1)])
        await until(lambda: owner.ask("load", 0, 4) == ["ok", "miss", "ok", "ok"], "the file is gone")
        guest.drop()
        await until(lambda: owner.ask("load", 0, 4) == ["miss"] * 4, "all are gone")
        guest.close(soon())


async def test_a_file_system_without_locks_has_no_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some network file systems have none: objects are shared all the same, and each process saves up to its share."""

    def no_locks(place: Place) -> int | None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("kvstore.disk.tier.lock_exclusively", no_locks)
    monkeypatch.setattr(upkeep, "lock_exclusively", no_locks)
    tier, other = (open_shared(tmp_path / "kv", objects=4) for _ in range(2))
    assert sorted(statuses(save(tier, range(6)))) == ["ok"] * 4 + ["refused"] * 2
    assert sorted(loaded(other, range(6))) == ["miss"] * 2 + ["ok"] * 4
    assert "nobody evicts" in caplog.text
    for one in (tier, other):
        one.close(soon())
