"""Several API processes of one server answer operators alike, whichever of them is asked."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.headrace_server import HeadraceServer, headrace
from tests.support.until import until

TINY = {"dtype": "float32", "block_size": 16, "kv_cache_memory": "8MiB", "threads": 1, "api_processes": 2}
BODY = {"prompt": "One prompt of a few blocks. " * 8, "max_tokens": 3, "n": 2, "ignore_eos": True}


@asynccontextmanager
async def client_of_each(server: HeadraceServer) -> AsyncIterator[list[httpx.AsyncClient]]:
    """A client for each process: it has one connection, which was made while the other processes were stopped."""
    async with AsyncExitStack() as stack:
        clients = []
        for api in server.apis:
            others = [one for one in server.apis if one != api]
            for other in others:
                other.send_signal(signal.SIGSTOP)
            limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
            client = httpx.AsyncClient(base_url=await server.url(), timeout=60, limits=limits, trust_env=False)
            clients.append(await stack.enter_async_context(client))
            await client.get("/health")
            for other in others:
                other.send_signal(signal.SIGCONT)
        for client in clients:
            await until(lambda client=client: is_ready(client), "every process is ready", limit_s=120)  # type: ignore[misc]
        yield clients


async def is_ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/ready")).status_code == 200


async def explained(client: httpx.AsyncClient, request_id: str) -> list[dict[str, object]]:
    """Return the decisions, none while the process is not yet told of them."""
    response = await client.get("/router/explain", params={"request_id": request_id})
    decisions: list[dict[str, object]] = response.json()["decisions"] if response.status_code == 200 else []
    return decisions


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    lines = (await client.get("/metrics")).text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def of_targets(seen: dict[str, float], name: str) -> dict[str, float]:
    return {labels: value for labels, value in seen.items() if labels.startswith(f"{name}{{")}


@pytest.mark.parametrize("replicas", [1, 2])
async def test_every_process_tells_why_and_what(tiny_model: Path, tmp_path: Path, replicas: int) -> None:
    with headrace(tmp_path, str(tiny_model), replicas=replicas, **TINY) as server:
        await server.wait_ready()
        async with client_of_each(server) as clients:
            for asked in clients:

                async def has_all(client: httpx.AsyncClient = asked) -> bool:
                    listed = (await client.get("/router/workers")).json()
                    usable = [one["connection"] == "ready" and one["status"] is not None for one in listed]
                    return usable == [True] * replicas

                await until(has_all, "every engine is ready", limit_s=120)
                answer = await asked.post(
                    "/v1/completions", json={"model": str(tiny_model), **BODY}, headers={"x-headrace-debug": "1"}
                )
                assert answer.status_code == 200, answer.text
                told = dict(field.split("=") for field in answer.headers["x-headrace-debug"].split("; "))
                assert (told["policy"], told["candidates"], told["attempts"]) == ("prefix", str(replicas), "1")
                request_id = answer.json()["id"]
                for client in clients:

                    async def is_known(client: httpx.AsyncClient = client, request_id: str = request_id) -> bool:
                        return bool(await explained(client, request_id))

                    await until(is_known, "every process tells it", limit_s=120)
                    decisions = await explained(client, request_id)
                    assert len(decisions) == 2, "one for each choice"
                    assert told["target"] in {one["target_id"] for one in decisions}
                    assert not await explained(client, request_id + "x")
            await check_metrics(clients, replicas)


async def check_metrics(clients: list[httpx.AsyncClient], replicas: int) -> None:
    for client in clients:

        async def is_told(client: httpx.AsyncClient = client) -> bool:
            seen = await metrics(client)
            decided = of_targets(seen, "headrace_router_decision_seconds_count")
            drift = of_targets(seen, "headrace_target_drift")
            return list(decided.values()) == [4] and list(drift.values()) == [0] * replicas

        await until(is_told, "what both have done is told, and nothing is under way", limit_s=120)
        seen = await metrics(client)
        assert list(of_targets(seen, "headrace_target_breaker_state").values()) == [0] * replicas
        assert len(of_targets(seen, "headrace_router_index_bytes")) == 1
        if replicas == 1:
            assert not of_targets(seen, "headrace_target_index_events_total"), "a single engine tells nothing"
            continue

        async def is_indexed(client: httpx.AsyncClient = client) -> bool:
            seen = await metrics(client)
            blocks = of_targets(seen, "headrace_router_index_blocks")
            lags = of_targets(seen, "headrace_target_event_lag_seconds")
            return sum(blocks.values()) > 0 and len(lags) == replicas

        await until(is_indexed, "what the engines cache is known", limit_s=120)
        events = of_targets(await metrics(client), "headrace_target_index_events_total")
        dumps = [value for labels, value in events.items() if 'kind="dumps"' in labels]
        assert len(dumps) == replicas
        assert min(dumps) >= 2, "each process has read it"
