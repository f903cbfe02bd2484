"""The real HTTP application on a real port, in the test's own event loop, in front of any Engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import msgspec
from fastapi import FastAPI

from engine.protocol import Admin, Engine
from server.access.credentials import Credentials
from server.access.usage_table import UsageTable
from server.api_process import DrainingServer
from server.app import build_app
from server.config import ServeConfig
from server.health import Readiness
from server.served_model import ServedModel
from server.service import Models, Service
from tests.support.fake_engine import FakeReadiness


@dataclass
class ApiServer:
    url: str
    client: httpx.AsyncClient
    server: DrainingServer
    app: FastAPI
    service: Service

    @property
    def model(self) -> ServedModel:
        """The only one that is served."""
        (model,) = self.service.models.served()
        return model

    async def post(self, path: str, body: object) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def chat(self, **fields: object) -> httpx.Response:
        return await self.post("/v1/chat/completions", chat_body(**fields))

    async def complete(self, **fields: object) -> httpx.Response:
        return await self.post("/v1/completions", completion_body(**fields))

    async def events(self, path: str, body: object) -> list[str]:
        """Return the data of every event of a stream."""
        return event_data((await self.post(path, body)).text)


def chat_body(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hi there"}], **fields}


def completion_body(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": "Hi there", **fields}


def event_data(text: str) -> list[str]:
    events = [event for event in text.strip("\n").split("\n\n") if event and not event.startswith(":")]
    assert all(event.startswith("data: ") for event in events), text
    return [event.removeprefix("data: ") for event in events]


def chunks(events: list[str]) -> list[dict[str, object]]:
    """The JSON of a complete stream's events."""
    assert events[-1] == "[DONE]", events[-1]
    return [msgspec.json.decode(event) for event in events[:-1]]


class ListedModels:
    """The `Models` of a server whose models do not change."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = models

    def served(self) -> Sequence[ServedModel]:
        return self._models

    async def start(self) -> None:
        for model in self._models:
            model.start()

    async def close(self) -> None:
        for model in self._models:
            await model.close()


@asynccontextmanager
async def serving(
    engine: Engine,
    *,
    config: ServeConfig | None = None,
    state: Readiness | None = None,
    wait: bool = True,
    credentials: Credentials | None = None,
    admin: Admin | None = None,
    usage: UsageTable | None = None,
) -> AsyncIterator[ApiServer]:
    """Serve until the block ends. `wait` returns only when the model's text is there."""
    model = ServedModel(engine, state or FakeReadiness(), admin=admin)
    async with serving_models(ListedModels([model]), config=config, credentials=credentials, usage=usage) as server:
        if wait:
            await model.opened.wait()
        yield server


@asynccontextmanager
async def serving_models(
    models: Models,
    *,
    config: ServeConfig | None = None,
    credentials: Credentials | None = None,
    usage: UsageTable | None = None,
) -> AsyncIterator[ApiServer]:
    """The server's own main loop, which polls for the end ten times a second, is left out: tests end when they end."""
    config = config or ServeConfig()
    app = build_app(models, config=config, credentials=credentials, usage=usage)
    server = DrainingServer(app, config)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await server.startup([listener])
        try:
            async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                yield ApiServer(url, client, server, app, app.state.service)
        finally:
            for open_server in server.servers:
                open_server.close()
            for connection in list(server.server_state.connections):
                connection.shutdown()
            if server.server_state.tasks:
                await asyncio.wait(server.server_state.tasks, timeout=10)
            await server.lifespan.shutdown()
