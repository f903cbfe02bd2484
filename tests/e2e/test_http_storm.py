"""A storm of clients on the real server: whatever they do, nothing of them is left, and each request ended once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.support.chaos import target_gauges, wait_serving
from tests.support.headrace_server import HeadraceServer, headrace
from tests.support.storm import Storm
from tests.support.until import until

# Small enough that requests queue, are preempted and share prefixes: 47 blocks for 32 requests of up to 8 each.
SMALL = {"max_running": 32, "max_step_tokens": 128, "kv_cache_memory": "768KiB", "threads": 1}

MEMORY_GROWTH_BYTES = 24 << 20
"""Of any process in the second half of the soak, which is 5 KB a request. The first half fills caches: kernels of all
batch shapes in the engine, words of the tokenizer in the API processes."""


async def wait_quiet(server: HeadraceServer, storm: Storm) -> None:
    """Return when the server has done with every request of the storm; check that each was counted once."""
    tally = storm.tally

    async def all_counted() -> bool:
        metrics = await server.metrics()
        return sum(value for name, value in metrics.items() if _is_generation(name)) >= tally.requests

    await until(all_counted, "every request has ended at the HTTP layer")
    load = await server.wait_idle()
    counted = sum(value for name, value in (await server.metrics()).items() if _is_generation(name))
    assert counted == tally.requests
    assert load.kv_blocks_used == 0
    await until(lambda: nothing_in_flight(server), "every lease was given back")
    assert load.requests_total.get("error", 0) == 0
    # Everything a client got to its end has ended in the engine, and nothing has ended that nobody asked for. A stop
    # string in the last token that was allowed is "stop" to the client and "length" to the engine.
    ended = Counter(load.requests_total)
    assert ended["length"] >= tally.finished["length"]
    assert ended["length"] + ended["stop"] >= sum(tally.finished.values())
    assert sum(tally.finished.values()) < sum(ended.values()) <= tally.choices


async def nothing_in_flight(server: HeadraceServer) -> bool:
    in_flight = target_gauges(await server.metrics(), "in_flight")
    assert in_flight
    return not any(in_flight.values())


def _is_generation(name: str) -> bool:
    return name.startswith("headrace_http_requests_total") and "completions" in name


async def wait_descriptors(processes: list[psutil.Process], before: list[int]) -> None:
    def are_back() -> bool:
        return all(process.num_fds() <= count for process, count in zip(processes, before, strict=True))

    await until(are_back, f"descriptors are back to {before}")


async def test_500_clients_leave_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    with headrace(tmp_path, tiny_model, **SMALL, max_waiting=200) as server:
        await server.wait_ready()
        processes = [server.core, *server.apis]
        storm = Storm(await server.url(), str(tiny_model))
        await storm.run(100, concurrency=64, seed=1)
        await wait_quiet(server, storm)
        before = [process.num_fds() for process in processes]
        await storm.run(500, concurrency=64, seed=2)
        await wait_quiet(server, storm)
        await wait_descriptors(processes, before)
        load = await server.load()
        assert load.preemptions_total > 0
        assert load.cached_tokens_total > 0
        assert load.requests_total["abort"] > 50
        assert storm.tally.finished["stop"] > 0


async def test_300_clients_leave_nothing_behind_at_two_replicas(tiny_model: Path, tmp_path: Path) -> None:
    with headrace(tmp_path, tiny_model, **SMALL, max_waiting=200, replicas=2) as server:
        await server.wait_ready()
        await wait_serving(server, 2)
        storm = Storm(await server.url(), str(tiny_model))
        await storm.run(300, concurrency=64, seed=3)
        await wait_quiet(server, storm)


@pytest.mark.soak
@pytest.mark.parametrize(("api_processes", "replicas"), [(1, 1), (2, 1), (1, 2), (2, 2)])
async def test_10000_clients_leave_nothing_behind(
    tiny_model: Path, tmp_path: Path, api_processes: int, replicas: int, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = {"api_processes": api_processes, "replicas": replicas}
    with headrace(tmp_path, tiny_model, **SMALL, max_waiting=200, **counts) as server:
        await server.wait_ready()
        await wait_serving(server, replicas)
        processes = [*server.cores, *server.apis]
        storm = Storm(await server.url(), str(tiny_model))
        await storm.run(5000, concurrency=128, seed=1)
        await wait_quiet(server, storm)
        descriptors = [process.num_fds() for process in processes]
        memory = [process.memory_info().rss for process in processes]
        await storm.run(5000, concurrency=128, seed=2)
        await wait_quiet(server, storm)
        await wait_descriptors(processes, descriptors)
        growth = [process.memory_info().rss - before for process, before in zip(processes, memory, strict=True)]
        assert max(growth) < MEMORY_GROWTH_BYTES, growth
        load = await server.load()
        with capsys.disabled():
            print(f"\n{storm.tally}\n{load}\nmemory growth {growth} bytes, descriptors {descriptors}")
