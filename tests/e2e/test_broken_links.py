"""A gateway whose links to its workers die in the middle of a frame, and thousands of clients that leave. Nothing is
lost, and nothing is left: real processes, and a proxy that stops forwarding.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest

from tests.support.headrace_server import HeadraceServer
from tests.support.stalling_proxy import stalling_proxy
from tests.support.text_core import alphabet_text
from tests.support.text_fleet import (
    LIMIT_S,
    TextFleet,
    ask,
    body,
    in_flight,
    wait_in_flight,
    wait_running,
    wait_serving,
)
from tests.support.until import until

SLACK_FDS = 16
"""Connections between the processes come and go. A descriptor for each request would be many more."""

RESUMED = 'headrace_router_retries_total{cause="resumed",model="tiny"}'


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[TextFleet]:
    with ExitStack() as stack:
        yield TextFleet(tmp_path, stack)


async def test_streams_outlive_links_that_die_within_a_frame(fleet: TextFleet, tmp_path: Path) -> None:
    workers = [fleet.worker("a"), fleet.worker("b")]
    records = [await worker.ready_ranks(1) for worker in workers]
    (rank,) = records[0].ranks
    async with stalling_proxy(rank.wire) as proxy:
        records[0] = msgspec.structs.replace(records[0], ranks=(msgspec.structs.replace(rank, wire=proxy.address),))
        listing = tmp_path / "workers.json"
        listing.write_bytes(msgspec.json.encode(records))
        server = fleet.gateway("g1", register=f"static:{listing}", stall_timeout="1s")
        await wait_serving(server, 2)
        async with await server.client() as client:
            resumed = 0.0
            for harm in ("stall", "cut"):
                await _trusted(server, client)
                streams = [asyncio.create_task(ask(client, 1200)) for _ in range(6)]
                await wait_running(workers, 6)
                assert (await in_flight(server))["a/0"] > 0
                proxy.stall_after(1001)
                await until(lambda: proxy.is_stalled, "an answer has stopped in the middle")
                if harm == "cut":
                    proxy.cut()
                    proxy.go_on()
                await asyncio.gather(*streams)
                proxy.go_on()
                await wait_running([workers[0]], 0)
                await wait_serving(server, 2)
                await wait_in_flight(server, 0)

                async def has_resumed(before: float = resumed) -> bool:
                    return (await server.metrics()).get(RESUMED, 0.0) > before

                await until(has_resumed, "streams went on elsewhere")
                resumed = (await server.metrics())[RESUMED]


async def _trusted(server: HeadraceServer, client: httpx.AsyncClient) -> None:
    """Ask until no engine is passed over for its faults: one that was is asked again after some seconds."""

    async def are_all() -> bool:
        await asyncio.gather(*(ask(client, 5) for _ in range(4)))
        listed = json.loads((await server.get("/router/workers"))[1])
        return all(one["status"]["breaker"] == "closed" for one in listed)

    await until(are_all, "all engines are trusted", limit_s=LIMIT_S)


class Leavers:
    """Clients with short requests, half of which leave early."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self.ends: Counter[str] = Counter()
        self._client = client
        self._rng = random.Random(seed)

    async def ask_all(self, count: int, at_once: int) -> None:
        gate = asyncio.Semaphore(at_once)

        async def one() -> None:
            async with gate:
                tokens, kind = self._rng.randint(1, 20), self._rng.choice(("whole", "whole", "early", "within"))
                self.ends[await self._ask(tokens, kind)] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(one())

    async def _ask(self, tokens: int, kind: str) -> str:
        wanted = body(tokens if kind == "whole" else 90_000, stream=kind == "within")
        if kind == "whole":
            response = await self._client.post("/v1/completions", json=wanted, timeout=LIMIT_S)
            assert response.json()["choices"][0]["text"] == alphabet_text(tokens)
        elif kind == "early":
            asked = asyncio.create_task(self._client.post("/v1/completions", json=wanted, timeout=LIMIT_S))
            await asyncio.sleep(self._rng.uniform(0.0, 0.1))  # wherever the request is by then
            asked.cancel()
            await asyncio.wait([asked])
        else:
            async with self._client.stream("POST", "/v1/completions", json=wanted, timeout=LIMIT_S) as response:
                lines = response.aiter_lines()
                for _ in range(tokens):
                    await anext(lines)
        return kind


async def storm(fleet: TextFleet, rounds: int, count: int) -> tuple[Counter[str], list[tuple[int, int]]]:
    """Return how requests ended, and after each round the API process's descriptors and MiB, with nothing left."""
    workers = [fleet.worker("a"), fleet.worker("b")]
    server = fleet.gateway("g1")
    await wait_serving(server, 2)
    (api,) = server.apis
    ends: Counter[str] = Counter()
    used = []
    for number in range(rounds):
        async with await server.client() as client:
            leavers = Leavers(client, number)
            await leavers.ask_all(count, at_once=64)
            ends += leavers.ends
        await wait_running(workers, 0)
        await wait_in_flight(server, 0)
        used.append(await _settled(server, api))
    return ends, used


async def _settled(server: HeadraceServer, api: psutil.Process) -> tuple[int, int]:
    """Return descriptors and MiB once the clients' connections are gone."""

    def has_no_client() -> bool:
        port = int(server.text.partition("listening on http://127.0.0.1:")[2].split()[0])
        return not [one for one in api.net_connections("tcp") if one.laddr.port == port and one.status != "LISTEN"]

    await until(has_no_client, "the clients' connections are closed", limit_s=LIMIT_S)
    return api.num_fds(), api.memory_info().rss >> 20


async def test_a_storm_of_clients_that_leave_leaves_nothing(fleet: TextFleet) -> None:
    ends, used = await storm(fleet, rounds=2, count=60)
    assert ends.total() == 120
    assert used[1][0] < used[0][0] + SLACK_FDS


@pytest.mark.soak
async def test_5000_clients_that_leave_leave_nothing(fleet: TextFleet, capsys: pytest.CaptureFixture[str]) -> None:
    ends, used = await storm(fleet, rounds=5, count=1000)
    with capsys.disabled():
        print(f"\n{dict(ends)}; descriptors and MiB after each thousand: {used}")
    assert used[-1][0] < used[0][0] + SLACK_FDS
    assert used[-1][1] < used[1][1] + 20, "memory grows"
