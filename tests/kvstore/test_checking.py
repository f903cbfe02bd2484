"""Processes that check what is in memory: they find what is wrong, and nothing waits for one that died or hangs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from kvstore.keys import PUBLIC_SCOPE
from kvstore.manager import loading
from kvstore.manager.checking import CheckProcesses
from kvstore.manager.config import StoreConfig
from kvstore.manager.store import KVStore
from kvstore.object_key import ObjectKey
from kvstore.ram.tier import RamTier
from kvstore.tier import Deadline
from tests.support.kv_objects import NAMESPACE, PART, key_of, object_of
from tests.support.store_engine import StoreEngine
from tests.support.until import until

OBJECTS = 40


def wait(condition: Callable[[], bool], what: str) -> None:
    asyncio.run(until(condition, what, limit_s=60.0))


@pytest.fixture
def ram() -> Iterator[RamTier]:
    tier = RamTier(16 << 20)
    for number in range(OBJECTS):
        slot = tier.reserve(key_of(number), PART.object_bytes)
        assert slot is not None
        slot.view[:] = object_of(number)
        slot.publish()
    yield tier
    tier.close(Deadline.after(1.0))


def objects(ram: RamTier) -> list[tuple[int, int, ObjectKey]]:
    found = []
    for number in range(OBJECTS):
        with ram.lease(key_of(number), "test") as lease:  # type: ignore[union-attr]
            found.append((0, lease.offset, lease.key))
    return found


@pytest.fixture
def processes(ram: RamTier) -> Iterator[CheckProcesses]:
    checks = CheckProcesses(ram.arena.fd, [PART], 2)
    wait(lambda: sum(one.is_ready for one in checks._processes) == 2, "both are ready")
    yield checks
    started = list(checks._processes)
    checks.close()
    assert all(one.process.poll() is not None for one in started)


def answer(future: Future[int] | None) -> int:
    assert future is not None
    return future.result(60)


def test_they_count_what_is_right_before_the_first_that_is_not(ram: RamTier, processes: CheckProcesses) -> None:
    asked = objects(ram)
    assert answer(processes.ask(asked)) == OBJECTS
    assert answer(processes.ask(asked[7:8])) == 1
    ram.arena.view(asked[7][1], PART.object_bytes)[PART.header_bytes + 5] ^= 4
    assert answer(processes.ask(asked)) == 7
    assert answer(processes.ask(asked[8:])) == OBJECTS - 8
    exchanged = [asked[0], (0, asked[1][1], asked[2][2])]
    assert answer(processes.ask(exchanged)) == 1, "the object of another key"


def test_one_that_dies_leaves_its_work_unchecked_and_the_others_go_on(ram: RamTier, processes: CheckProcesses) -> None:
    asked = objects(ram)
    for one in processes._processes:
        one.process.send_signal(signal.SIGSTOP)
    waiting = [processes.ask(asked) for _ in range(4)]
    processes._processes[0].process.kill()
    for one in processes._processes[1:]:
        one.process.send_signal(signal.SIGCONT)
    assert {answer(one) for one in waiting} <= {0, OBJECTS}
    wait(lambda: len(processes._processes) == 1, "the death was noticed")
    assert answer(processes.ask(asked)) == OBJECTS
    processes.kill()
    wait(lambda: not processes._processes, "all are dead")
    assert processes.ask(asked) is None


@pytest.mark.parametrize("fault", ["none", "dead", "stopped"])
def test_loads_are_right_whatever_their_checkers_do(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MIN_CHECK_S", 0.2)
    monkeypatch.setattr(loading, "BASE_S", 0.2)
    store = KVStore(StoreConfig(ram_bytes=16 << 20, always_load=True, check_processes=2))
    engine = StoreEngine(store, NAMESPACE)
    try:
        checks = engine.client._processes
        assert checks is not None
        wait(lambda: sum(one.is_ready for one in checks._processes) == 2, "both are ready")
        tokens = list(range(6 * NAMESPACE.block_size))
        engine.compute(tokens)
        assert store.flush(Deadline.after(60.0))
        for one in list(checks._processes):
            if fault == "dead":
                one.process.kill()
            elif fault == "stopped":
                one.process.send_signal(signal.SIGSTOP)
        assert engine.load(tokens) == (["ram"] * 6, 6)
        (key, *_) = engine.client.keys_of(PUBLIC_SCOPE, engine.keys_of(tokens)[3:4])
        lease = store.ram.lease(key, "test")
        assert lease is not None
        with lease:
            store.ram.arena.view(lease.offset, 8)[0] ^= 1
        assert engine.load(tokens) == (["ram"] * 6, 3)
        assert sum(store.ram.stats().corrupt.values()) == 1
    finally:
        engine.close()
        store.close(Deadline.after(30.0))
