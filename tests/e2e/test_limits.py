"""A server of several processes as users run it: one limit for all API processes, and one order of priorities."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.headrace_server import HeadraceServer, headrace
from tests.support.raw_http import exchange, send
from tests.support.storm import COMPLETIONS
from tests.support.tiny_models import write_tiny_llama
from tests.support.until import until

KEY = "hr-limited-0123456789abcdef"


async def test_api_processes_count_the_requests_of_a_key_together(tmp_path: Path, tiny_model: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}: {{tenant: a, requests_per_minute: 6}}\n")
    keys.chmod(0o600)
    with headrace(tmp_path, tiny_model, api_processes=2, api_keys_file=keys, kv_cache_memory="16MiB") as server:
        await server.wait_ready()
        began = time.monotonic()
        answers = [await ask_for_nothing(await server.url()) for _ in range(24)]
        drained = (time.monotonic() - began) / 10
        passed = sum(answer.status_code == 404 for answer in answers)
        # Of processes that counted alone each would let six pass.
        assert 6 <= passed <= 6 + drained
        assert {answer.status_code for answer in answers} <= {404, 429}
        assert all(answer.headers["x-ratelimit-limit-requests"] == "6" for answer in answers)


async def ask_for_nothing(url: str) -> httpx.Response:
    """Ask over a new connection, which any of the API processes may take, for what needs no model: those may not have
    it yet."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        return await client.get(f"{url}/v1/nothing", headers={"authorization": f"Bearer {KEY}"})


def body(server: HeadraceServer, **fields: object) -> dict[str, object]:
    return {"model": server.model, "prompt": "Hi", "ignore_eos": True, "max_tokens": 2, **fields}


async def prefill_rate(server: HeadraceServer) -> float | None:
    (worker,) = json.loads((await server.get("/router/workers"))[1])
    rate: float | None = worker["status"]["prefill_rate"]
    return rate


async def queued(server: HeadraceServer) -> float:
    metrics = await server.metrics()
    return sum(value for name, value in metrics.items() if name.startswith("headrace_router_queued{"))


@pytest.fixture
def slow_model(tmp_path: Path) -> Path:
    """One whose long answer takes much longer than a request's way to the engine."""
    return write_tiny_llama(
        tmp_path / "model", hidden_size=512, intermediate_size=1536, layers=6, heads=8, max_positions=4096
    )


async def test_who_waits_in_the_router_is_served_by_priority(tmp_path: Path, slow_model: Path) -> None:
    """The engine has one request that runs and one that waits, and is stopped while others come."""
    options: dict[str, Any] = {"threads": 1, "max_running": 1, "kv_cache_memory": "64MiB", "prefill_budget": "1ms"}
    with headrace(tmp_path, slow_model, **options) as server:
        await server.wait_ready()
        url = await server.url()

        async def is_measured() -> bool:
            assert (await exchange(url, COMPLETIONS, body(server)))[0] == 200
            return await prefill_rate(server) is not None

        await until(is_measured, "it is known how fast the engine is")
        _, running = await send(url, COMPLETIONS, body(server, max_tokens=4000, stream=True))

        async def runs(waiting: int) -> bool:
            load = await server.load()
            return (load.running, load.waiting) == (1, waiting)

        await until(lambda: runs(0), "the first runs")
        second = asyncio.create_task(exchange(url, COMPLETIONS, body(server)))
        await until(lambda: runs(1), "the second waits in the engine")
        server.core.send_signal(signal.SIGSTOP)
        try:
            asked = {
                priority: asyncio.create_task(exchange(url, COMPLETIONS, body(server, priority=priority)))
                for priority in (4, 0, -4)
            }
            _, leaving = await send(url, COMPLETIONS, body(server, prompt="leaves", priority=-9))

            async def are_queued(count: int) -> bool:
                return await queued(server) == count

            await until(lambda: are_queued(4), "all are queued")
            leaving.close()
            await until(lambda: are_queued(3), "one has left")
        finally:
            server.core.send_signal(signal.SIGCONT)
        running.close()
        assert (await second)[0] == 200
        began_s = {priority: await decided_s(server, await task) for priority, task in asked.items()}
        assert sorted(began_s, key=began_s.__getitem__) == [-4, 0, 4]
        await server.wait_idle()
        metrics = await server.metrics()
        assert not any(name.startswith("headrace_router_shed_total") for name in metrics)


async def decided_s(server: HeadraceServer, answer: tuple[int, str]) -> float:
    """Return when the router chose the engine for an answered request."""
    status, text = answer
    assert status == 200, text
    explained = json.loads((await server.get(f"/router/explain?request_id={json.loads(text)['id']}"))[1])
    (decision,) = explained["decisions"]
    at_s: float = decision["at_s"]
    return at_s
