"""Engines that are connected and do not answer: their requests go on elsewhere, and they are used again once awake."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from engine.wire.client import RemoteEngine
from engine.wire.merge import merge_outputs
from engine.wire.remote_state import RemoteState
from router.supervisor import Supervisor
from server.fleet.stalls import LOOKS, MAX_PATIENCE, StallWatch
from tests.support.holdable import HOLD, LET_GO
from tests.support.scripted_engine import ScriptedProcess, scripted_process, scripted_tokens
from tests.support.static_pool import StaticPool, StaticTarget
from tests.support.until import until
from tests.support.wire_requests import collect, request

COUNT = 2000


@dataclass
class World:
    processes: list[ScriptedProcess]
    engines: list[RemoteEngine]
    pool: StaticPool
    supervisor: Supervisor
    watch: StallWatch

    async def stream(self, number: int) -> None:
        """Ask for a stream, which must come as if nothing had been."""
        asked = self.supervisor.generate(request(f"r{number}", seed=number, count=COUNT))
        whole = merge_outputs([output async for output in asked])
        assert (whole.token_ids, whole.finish_reason) == (scripted_tokens(number, COUNT), "length")

    async def begin(self, streams: int) -> list[asyncio.Task[None]]:
        """Return streams that run on all engines."""
        tasks = [asyncio.create_task(self.stream(number)) for number in range(streams)]

        def runs_everywhere() -> bool:
            return all(engine.latest_load is not None and engine.latest_load.running > 0 for engine in self.engines)

        await until(runs_everywhere, "streams run on every engine")
        return tasks


@asynccontextmanager
async def running(path: Path, count: int) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        processes, engines = [], []
        for number in range(count):
            address = f"ipc://{path}/{number}"
            processes.append(stack.enter_context(scripted_process(address)))
            engines.append(RemoteEngine(address, watch_load=True))
            engines[-1].open()
            stack.callback(engines[-1].close)
        for engine in engines:
            await engine.wait_ready()
        pool = StaticPool([StaticTarget(engine.address, engine) for engine in engines])
        yield World(processes, engines, pool, Supervisor(pool), StallWatch(lambda: engines, 1.0))


@pytest.mark.parametrize(("hold", "wake"), [(HOLD, LET_GO), (signal.SIGSTOP, signal.SIGCONT)], ids=["stuck", "stopped"])
async def test_streams_of_a_silent_engine_go_on_elsewhere_and_it_is_used_again(
    tmp_path: Path, hold: signal.Signals, wake: signal.Signals
) -> None:
    async with running(tmp_path, 2) as world:
        watching = asyncio.create_task(world.watch.run())
        tasks = await world.begin(16)
        silent = world.engines[0]
        world.processes[0].signal(hold)
        await asyncio.gather(*tasks)
        assert silent.counters["given_up"] >= 1
        assert silent.num_running == 0
        assert set(world.pool.in_flight.values()) == {0}
        watching.cancel()

        world.processes[0].signal(wake)
        await silent.wait_ready()

        async def is_idle() -> bool:
            return (await silent.load()).running == 0

        await until(is_idle, "what it had when it fell silent is ended there")
        await asyncio.gather(*(await world.begin(16)))
        assert silent.counters["late_outputs"] == 0


async def test_the_only_engine_is_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path, 1) as world:
        tasks = await world.begin(4)
        world.processes[0].signal(HOLD)
        for _ in range(10 * LOOKS):
            world.watch.look()
            await asyncio.sleep(0)
        world.processes[0].signal(LET_GO)
        await asyncio.gather(*tasks)
        assert world.engines[0].counters["given_up"] == world.supervisor.counters["resumed"] == 0


async def test_a_request_of_a_silent_engine_that_dies_goes_on_at_its_successor(tmp_path: Path) -> None:
    async with running(tmp_path, 1) as world:
        tasks = await world.begin(4)
        world.processes[0].signal(HOLD)
        world.processes[0].signal(signal.SIGKILL)
        await world.processes[0].restart()
        await asyncio.gather(*tasks)


async def test_an_engine_that_is_given_up_ends_what_it_was_asked(tmp_path: Path) -> None:
    async with running(tmp_path, 1) as world:
        (engine,) = world.engines
        tasks = await world.begin(8)
        engine.give_up("Enough of it.")
        assert not engine.is_ready
        await asyncio.gather(*tasks)
        assert world.supervisor.counters["resumed"] + world.supervisor.counters["retried"] == 8

        async def has_ended_all() -> bool:
            load = await engine.load()
            return (load.running, load.requests_total) == (0, {"abort": 8, "length": 8})

        await until(has_ended_all, "each attempt has ended")
        assert (await collect(engine, request())).token_ids == scripted_tokens(1, 20)


class TalkingEngine:
    """Says something at each look, unless it is `silent`."""

    def __init__(self, state: Literal["loading", "ready", "draining"] = "ready") -> None:
        self.address = "here"
        self.silent = False
        self.incarnation = "first"
        self.given_up = 0
        self._state: Literal["loading", "ready", "draining"] = state
        self._frames = 0

    @property
    def frames_received(self) -> int:
        self._frames += not self.silent
        return self._frames

    def state(self) -> RemoteState:
        return RemoteState(state=self._state, incarnation=self.incarnation)

    def give_up(self, reason: str) -> None:
        self.given_up += 1


def looks_until_given_up(watch: StallWatch, engine: TalkingEngine, limit: int = 1000) -> int:
    """Let it be silent, and count; afterwards it has woken."""
    before = engine.given_up
    engine.silent = True
    looks = 0
    while engine.given_up == before and looks < limit:
        watch.look()
        looks += 1
    engine.silent = False
    watch.look()
    return looks


def test_an_engine_that_wakes_gets_more_time_and_a_new_process_the_first_again() -> None:
    slow, other = TalkingEngine(), TalkingEngine()
    watch = StallWatch(lambda: [slow, other], 1.0)
    watch.look()
    patience = [1, 2, 4, MAX_PATIENCE, MAX_PATIENCE]
    assert [looks_until_given_up(watch, slow) for _ in patience] == [LOOKS * times for times in patience]
    slow.incarnation = "second"
    watch.look()
    assert looks_until_given_up(watch, slow) == LOOKS
    assert other.given_up == 0


@pytest.mark.parametrize("other", ["loading", "draining", None])
def test_nothing_is_given_up_while_nobody_can_take_over(other: Literal["loading", "draining"] | None) -> None:
    silent = TalkingEngine()
    engines = [silent] if other is None else [silent, TalkingEngine(other)]
    assert looks_until_given_up(StallWatch(lambda: engines, 1.0), silent) == 1000


def test_one_that_loads_may_be_silent_and_one_that_drains_may_not() -> None:
    loads, drains = TalkingEngine("loading"), TalkingEngine("draining")
    watch = StallWatch(lambda: [loads, drains, TalkingEngine()], 1.0)
    watch.look()
    assert looks_until_given_up(watch, loads) == 1000
    assert looks_until_given_up(watch, drains) == LOOKS


def test_of_two_silent_engines_one_is_given_up_when_the_other_wakes() -> None:
    first, second = TalkingEngine(), TalkingEngine()
    watch = StallWatch(lambda: [first, second], 1.0)
    watch.look()
    first.silent = second.silent = True
    for _ in range(10 * LOOKS):
        watch.look()
    assert (first.given_up, second.given_up) == (0, 0)
    first.silent = False
    watch.look()
    assert (first.given_up, second.given_up) == (0, 1)
