"""From the first answer of the port to the exit code, with a real model.

Nothing here depends on speed: the engine's process is stopped (SIGSTOP) where a test needs it to stay as it is.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.api_server import event_data
from tests.support.headrace_server import CORE, HeadraceServer, headrace
from tests.support.until import until

ANSWER_TOKENS = 400

Start = Callable[..., HeadraceServer]


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda **flags: stack.enter_context(headrace(tmp_path, tiny_model, threads=1, **flags))


def body(server: HeadraceServer, **fields: object) -> dict[str, object]:
    return {"model": server.model, "prompt": "Hi", "max_tokens": ANSWER_TOKENS, "ignore_eos": True, **fields}


@asynccontextmanager
async def two_requests(
    server: HeadraceServer,
) -> AsyncIterator[tuple[asyncio.Task[httpx.Response], asyncio.Task[str]]]:
    """A whole answer and a stream, both under way in an engine that is now stopped."""
    async with await server.client() as client:
        begun = asyncio.Event()

        async def stream() -> str:
            lines = []
            async with client.stream("POST", "/v1/completions", json=body(server, stream=True)) as response:
                async for line in response.aiter_lines():
                    lines.append(line)
                    begun.set()
            return "\n".join(lines)

        whole = asyncio.create_task(client.post("/v1/completions", json=body(server)))
        streamed = asyncio.create_task(stream())

        async def both_run() -> bool:
            return (await server.load()).running == 2

        await until(both_run, "both run")
        await begun.wait()
        server.core.send_signal(signal.SIGSTOP)
        yield whole, streamed


async def status_of(server: HeadraceServer, path: str) -> tuple[int, str]:
    status, text = await server.get(path)
    return status, json.loads(text)["status"]


async def test_the_port_tells_the_progress_until_the_model_is_there(start: Start) -> None:
    server = start()
    await until(lambda: bool(server.children(CORE)), "the engine's process is there")
    server.core.send_signal(signal.SIGSTOP)
    async with await server.client() as client:
        health = await client.get("/health")
        ready = await client.get("/ready")
        answer = await client.post("/v1/completions", json=body(server))
        models = await client.get("/v1/models")
        assert (await client.get("/version")).status_code == 200
        for response in (health, ready):
            assert response.status_code == 503
            assert response.json()["status"] == "loading"
            assert 0 <= response.json()["progress"] <= 1
        for response in (answer, models):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "model_is_loading"
        assert all(int(response.headers["retry-after"]) >= 1 for response in (health, ready, answer, models))
        server.core.send_signal(signal.SIGCONT)
        await server.wait_ready()
        assert (await client.post("/v1/completions", json=body(server))).status_code == 200


async def test_sigterm_lets_running_requests_end(start: Start) -> None:
    server = start(drain_timeout=60)
    await server.wait_ready()
    async with two_requests(server) as (whole, streamed):
        server.process.terminate()

        async def is_draining() -> bool:
            return await status_of(server, "/ready") == (503, "draining")

        await until(is_draining, "the drain is told")
        assert await status_of(server, "/health") == (200, "draining")
        async with await server.client() as client:
            late = await client.post("/v1/completions", json=body(server))
        assert (late.status_code, late.json()["error"]["code"]) == (503, "server_is_draining")
        assert "retry-after" in late.headers
        assert not whole.done()
        assert not streamed.done()

        server.core.send_signal(signal.SIGCONT)
        assert (await whole).json()["usage"]["completion_tokens"] == ANSWER_TOKENS
        events = event_data(await streamed)
        assert events[-1] == "[DONE]"
        assert '"finish_reason":"length"' in events[-2]
        assert await server.exit_code() == 0


async def test_the_end_of_the_drain_is_told_to_those_who_are_cut_off(start: Start) -> None:
    server = start(drain_timeout=0.3)
    await server.wait_ready()
    async with two_requests(server) as (whole, streamed):
        server.process.terminate()
        answer = await whole
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_is_draining")
        events = event_data(await streamed)
        assert "[DONE]" not in events
        assert "server_is_draining" in events[-1]
        server.core.send_signal(signal.SIGCONT)
        assert await server.exit_code() == 0


@pytest.mark.soak
async def test_a_frozen_engine_makes_the_server_unready_and_its_streams_go_on_afterwards(start: Start) -> None:
    """It takes as long as heartbeats of the wire may be missed."""
    server = start(numerics="invariant")
    await server.wait_ready()
    async with two_requests(server) as (whole, streamed):

        async def is_restarting() -> bool:
            return await status_of(server, "/ready") == (503, "restarting")

        await until(is_restarting, "the missing heartbeats are noticed")
        server.core.send_signal(signal.SIGCONT)
        assert (await whole).json()["usage"]["completion_tokens"] == ANSWER_TOKENS
        assert event_data(await streamed)[-1] == "[DONE]"
        await server.wait_ready()
        load = await server.wait_idle()
        assert load.kv_blocks_used == 0
