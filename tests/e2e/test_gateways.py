"""Several gateways before the same workers, and workers that move: real processes that meet in a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.families import kill_family
from tests.support.text_fleet import (
    TextFleet,
    ask,
    begin,
    in_flight,
    load_on,
    wait_in_flight,
    wait_running,
    wait_serving,
)
from tests.support.until import until
from tests.support.worker_process import WorkerProcess


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[TextFleet]:
    with ExitStack() as stack:
        yield TextFleet(tmp_path, stack)


async def test_gateways_share_their_workers_and_one_is_restarted_under_load(fleet: TextFleet) -> None:
    workers = [fleet.worker("a"), fleet.worker("b")]
    one, two = fleet.gateway("g1"), fleet.gateway("g2")
    await asyncio.gather(wait_serving(one, 2), wait_serving(two, 2))
    async with await one.client() as first, await two.client() as second:
        lost, kept = await begin(first, 3), await begin(second, 2)
        for server in (one, two):
            await wait_in_flight(server, 5)
        assert await in_flight(one) == await in_flight(two), "each knows the other's, target by target"

        joins = fleet.gateway("g3")
        await joins.wait_ready()
        assert await in_flight(joins) == await in_flight(one), "it knows of all of them before it is ready"

        async with load_on(second, clients=4, tokens=20) as answers:
            kill_family(one.process)
            for stream in lost:
                with pytest.raises(httpx.TransportError):
                    await _read(stream)
            again = fleet.gateway("g1")
            await wait_serving(again, 2)
            async with await again.client() as client:
                await asyncio.gather(*(ask(client, 20) for _ in range(8)))
            before = list(answers)
            await until(
                lambda: all(now > then for now, then in zip(answers, before, strict=True)), "the other serves on"
            )
            for stream in kept:
                await anext(stream)
        for server in (again, two, joins):
            await wait_in_flight(server, 2)
        await wait_running(workers, 2)
        for stream in kept:
            await stream.aclose()  # type: ignore[attr-defined]
        for server in (again, two, joins):
            await wait_in_flight(server, 0)
        await wait_running(workers, 0)


async def test_streams_follow_a_worker_that_is_restarted_elsewhere_under_its_id(fleet: TextFleet) -> None:
    server = fleet.gateway("g1")
    worker = fleet.worker("a")
    await wait_serving(server, 1)
    (api,) = server.apis
    async with await server.client() as client:
        used: list[tuple[int, int]] = []
        for _ in range(2):
            streams = [asyncio.create_task(ask(client, 1000)) for _ in range(4)]
            await wait_running([worker], 4)
            worker = _moved(fleet, worker)
            await asyncio.gather(*streams)
            await wait_serving(server, 1)
            await wait_in_flight(server, 0)
            await wait_running([worker], 0)
            assert list(await in_flight(server)) == ["a/0"]
            if not used:
                used.append(_resources(api))
        await until(lambda: _resources(api) <= used[0], "nothing of the former connections is left")
    assert len(server.apis) == 1, "and nothing had to be started again"


async def _read(stream: AsyncIterator[str]) -> None:
    async for _ in stream:
        pass


def _moved(fleet: TextFleet, worker: WorkerProcess) -> WorkerProcess:
    """Kill a worker and start it under its name on other ports."""
    worker.kill()
    return fleet.worker("a")


def _resources(process: psutil.Process) -> tuple[int, int]:
    """Threads and file descriptors."""
    return process.num_threads(), process.num_fds()
