"""The HTTP port of one worker, of ours or another make, as far as a registry is concerned."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from router.registry.base import WorkerRecord
from router.registry.records import encode_record
from tests.support.registries import worker


class WorkerPort:
    """`asked` counts requests."""

    def __init__(self) -> None:
        self.body = encode_record(worker())
        self.status = 200
        self.asked = 0
        self.url = ""
        self.port = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(status=self.status, body=self.body)

    def say(self, record: WorkerRecord) -> None:
        self.body = encode_record(record)


@asynccontextmanager
async def worker_port(host: str = "127.0.0.1", number: int = 0) -> AsyncIterator[WorkerPort]:
    port = WorkerPort()
    application = web.Application()
    for path in ("/worker", "/v1/models"):
        application.router.add_get(path, port.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, host, number).start()
    port.port = runner.addresses[0][1]
    port.url = f"http://{host}:{port.port}"
    try:
        yield port
    finally:
        await runner.cleanup()
