"""The API process as a process: in front of an engine in another one, through loading, death and SIGTERM."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from server.api_process import forget_dead_processes
from server.config import ServeConfig
from tests.support.api_server import chat_body, chunks, completion_body, event_data
from tests.support.processes import ApiProcess, api_processes, text_core
from tests.support.text_core import alphabet_text
from tests.support.until import until


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"ipc://{tmp_path_factory.mktemp('w')}/e"


async def ready(client: httpx.AsyncClient) -> None:
    async def is_ready() -> bool:
        try:
            return (await client.get("/ready")).status_code == 200
        except httpx.TransportError:
            return False

    await until(is_ready, "the server is ready")


def client_of(api: ApiProcess) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=api.url, timeout=30)


async def text_of(lines: AsyncIterator[str], seen: list[str], enough: int | None = None) -> None:
    """Read a stream's lines into `seen`, all of them or until `enough`."""
    async for line in lines:
        seen.append(line)
        if enough is not None and len(seen) >= enough:
            return


def streamed_text(lines: list[str]) -> str:
    events = chunks(event_data("\n".join(lines)))
    return "".join(event["choices"][0]["text"] for event in events)


async def test_the_port_answers_before_there_is_an_engine_and_serves_after(address: str) -> None:
    with api_processes(address) as (api,):
        async with client_of(api) as client:

            async def answers() -> bool:
                return (await client.get("/health")).json()["status"] == "loading"

            await until(answers, "the port answers")
            refused = await client.post("/v1/chat/completions", json=chat_body())
            with text_core(address):
                await ready(client)
                whole = await client.post("/v1/completions", json=completion_body(max_tokens=40))
                stream = await client.post("/v1/completions", json=completion_body(max_tokens=40, stream=True))
                stopped = await client.post("/v1/completions", json=completion_body(max_tokens=4000, stop="xyzab"))
        assert api.stop() == 0
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "model_is_loading"
    assert whole.json()["choices"][0]["text"] == alphabet_text(40)
    assert streamed_text(stream.text.splitlines()) == alphabet_text(40)
    assert stopped.json()["choices"][0]["text"] == alphabet_text(23)
    assert stopped.json()["usage"]["completion_tokens"] == 28


async def test_a_stream_outlives_its_engine(address: str) -> None:
    lines: list[str] = []
    with api_processes(address) as (api,):
        async with client_of(api) as client:
            with text_core(address, step_s=0.005) as core:
                await ready(client)
                request = completion_body(max_tokens=100, stream=True)
                async with client.stream("POST", "/v1/completions", json=request) as response:
                    reader = response.aiter_lines()
                    await text_of(reader, lines, enough=20)
                    core.kill()
                    core.wait()

                    async def is_restarting() -> bool:
                        answer = await client.get("/health")
                        return (answer.status_code, answer.json()["status"]) == (503, "restarting")

                    await until(is_restarting, "/health tells of the restart")
                    with text_core(address):
                        await text_of(reader, lines)
                        await ready(client)
    assert streamed_text(lines) == alphabet_text(100)


async def test_sigterm_lets_streams_end_and_exits_cleanly(address: str) -> None:
    lines: list[str] = []
    with text_core(address, step_s=0.02), api_processes(address) as (api,):
        async with client_of(api) as client:
            await ready(client)
            request = completion_body(max_tokens=100, stream=True)
            async with client.stream("POST", "/v1/completions", json=request) as response:
                reader = response.aiter_lines()
                await text_of(reader, lines, enough=4)
                api.process.terminate()

                async def is_draining() -> bool:
                    return (await client.get("/ready")).status_code == 503

                await until(is_draining, "/ready tells of the drain")
                refused = await client.post("/v1/completions", json=completion_body())
                await text_of(reader, lines)
            code = await asyncio.to_thread(api.process.wait, 20)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert streamed_text(lines) == alphabet_text(100)
    assert code == 0


async def test_streams_that_outlast_the_drain_are_told(address: str) -> None:
    lines: list[str] = []
    config = ServeConfig(drain_timeout_s=0.1)
    with text_core(address, step_s=0.02), api_processes(address, config=config) as (api,):
        async with client_of(api) as client:
            await ready(client)
            request = completion_body(max_tokens=50_000, stream=True)
            async with client.stream("POST", "/v1/completions", json=request) as response:
                reader = response.aiter_lines()
                await text_of(reader, lines, enough=4)
                api.process.terminate()
                await text_of(reader, lines)
            code = await asyncio.to_thread(api.process.wait, 20)
    assert code == 0
    assert '"code":"server_is_draining"' in event_data("\n".join(lines))[-1]


async def test_a_client_that_leaves_frees_its_request_in_the_engine(address: str) -> None:
    with text_core(address, step_s=0.005), api_processes(address) as (api,):
        async with client_of(api) as client:
            await ready(client)
            body = chat_body(max_tokens=50_000, n=3)

            async def running() -> int:
                return int((await client.get("/load")).json()["running"])

            async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
                await anext(response.aiter_lines())
                assert await running() == 3
            async with httpx.AsyncClient(base_url=api.url) as other:
                whole = asyncio.create_task(other.post("/v1/chat/completions", json=body))

                async def has_begun() -> bool:
                    return await running() == 3

                await until(has_begun, "the request runs")
                whole.cancel()

            async def is_idle() -> bool:
                return await running() == 0

            await until(is_idle, "the engine is idle")


async def test_any_of_several_processes_tells_the_counts_of_all(address: str, tmp_path: Path) -> None:
    with (
        text_core(address),
        api_processes(address, count=2, metrics_dir=str(tmp_path)) as apis,
    ):
        async with client_of(apis[0]) as client:
            await ready(client)

        async def one() -> int:
            async with client_of(apis[0]) as client:  # a connection of its own: either process may take it
                await ready(client)
                return (await client.post("/v1/completions", json=completion_body(max_tokens=3))).status_code

        assert [await one() for _ in range(10)] == [200] * 10
        async with client_of(apis[0]) as client:
            metrics = (await client.get("/metrics")).text
        assert [api.stop() for api in apis] == [0, 0]
    counted = re.search(r"^headrace_generation_tokens_total (\S+)$", metrics, re.MULTILINE)
    assert counted is not None
    assert float(counted[1]) == 30


def test_a_new_process_drops_what_dead_ones_had_in_hand(tmp_path: Path) -> None:
    """Only of live values: counts of dead processes stay in the sums."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = [f"{kind}_{pid}.db" for kind in ("gauge_livesum", "counter") for pid in (gone.pid, os.getpid())]
    for name in names:
        (tmp_path / name).touch()
    forget_dead_processes(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])
