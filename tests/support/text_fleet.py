"""Gateways and workers as real processes around a real Valkey; their engines are torch-free and known by heart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx

from engine.config import EngineConfig
from server.config import WorkerConfig
from tests.support.headrace_server import HeadraceServer, gateway
from tests.support.text_core import alphabet_text
from tests.support.until import until
from tests.support.valkey_server import ValkeyServer, valkey_server
from tests.support.worker_process import WorkerProcess, worker_process

LIMIT_S = 120.0
ENDLESS_TOKENS = 90_000
"""At least seven minutes."""


class TextFleet:
    """All of it ends with the stack. Names may be used again once their process has ended."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.registry: ValkeyServer = stack.enter_context(valkey_server(directory))
        self._directory, self._stack = directory, stack
        self._starts = 0

    def worker(self, name: str, **fields: object) -> WorkerProcess:
        config = WorkerConfig(
            engine=EngineConfig(model="tiny"),
            worker_id=name,
            register=self.registry.url,
            **{"listen": "tcp://127.0.0.1:0", "http_port": 0, **fields},  # type: ignore[arg-type]
        )
        started = worker_process(self._place(), config, core_module="tests.support.text_core")
        return self._stack.enter_context(started)

    def gateway(self, name: str, **flags: object) -> HeadraceServer:
        known = {"register": self.registry.url, "dispatches_listen": f"ipc://{self._directory}/{name}"}
        return self._stack.enter_context(gateway(self._place(), "tiny", **{**known, **flags}))

    def _place(self) -> Path:
        self._starts += 1
        place = self._directory / str(self._starts)
        place.mkdir()
        return place


def body(tokens: int, **fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": "Hello", "max_tokens": tokens, **fields}


async def ask(client: httpx.AsyncClient, tokens: int) -> None:
    """Ask for an answer, which must be right."""
    response = await client.post("/v1/completions", json=body(tokens), timeout=LIMIT_S)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == alphabet_text(tokens)


async def chunks(client: httpx.AsyncClient, tokens: int = ENDLESS_TOKENS) -> AsyncIterator[str]:
    """Yield a streamed answer as it comes. Every piece is the alphabet's next."""
    said = 0
    async with client.stream("POST", "/v1/completions", json=body(tokens, stream=True), timeout=LIMIT_S) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            text = event["choices"][0]["text"]
            assert text == alphabet_text(said + len(text))[said:]
            said += len(text)
            if text:
                yield text
    assert said == tokens


async def begin(client: httpx.AsyncClient, count: int) -> list[AsyncIterator[str]]:
    """Return so many endless streams, each of which has begun."""
    streams = [chunks(client) for _ in range(count)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    return streams


async def in_flight(server: HeadraceServer) -> dict[str, int]:
    """Return what a gateway believes to be under way, its peers' too, by target."""
    status, text = await server.get("/router/workers")
    assert status == 200, text
    return {one["target_id"]: one["status"]["in_flight"] for one in json.loads(text) if one["status"] is not None}


async def wait_serving(server: HeadraceServer, count: int) -> None:
    """Return once the gateway is ready and routes to so many engines."""
    await server.wait_ready()

    async def routes() -> bool:
        samples = await server.metrics()
        ready = [value for name, value in samples.items() if name.startswith("headrace_target_ready{")]
        return ready == [1.0] * count

    await until(routes, f"{count} engines serve", limit_s=LIMIT_S)


async def wait_in_flight(server: HeadraceServer, count: int) -> None:
    """Return once a gateway believes that so many requests are under way."""

    async def are() -> bool:
        return sum((await in_flight(server)).values()) == count

    await until(are, f"{count} requests are under way", limit_s=LIMIT_S)


async def wait_running(workers: list[WorkerProcess], count: int) -> None:
    """Return once so many requests run on all engines together."""

    async def run() -> bool:
        loads = [json.loads((await worker.get("/load"))[1]) for worker in workers]
        return sum(load["running"] if load else 0 for ranks in loads for load in ranks.values()) == count

    await until(run, f"{count} requests run", limit_s=LIMIT_S)


@asynccontextmanager
async def load_on(client: httpx.AsyncClient, clients: int, tokens: int) -> AsyncIterator[list[int]]:
    """Have so many clients ask without a pause; each answer must be right. Yields how many each has had."""
    answers = [0] * clients
    leaving = False

    async def one(number: int) -> None:
        while not leaving:
            await ask(client, tokens)
            answers[number] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(one(number))
        yield answers
        leaving = True
