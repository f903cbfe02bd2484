"""A small HTTP server that answers as servers of other makes are documented to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class OtherServer:
    """Answers every POST with the given events, or with `status` and `body`. It splits no text. `parts` are the answers
    to requests that want none of events, one after the other."""

    events: Sequence[object] = ()
    status: int = 200
    body: bytes = b""
    parts: list[bytes] = field(default_factory=list)
    pages: dict[str, object] = field(default_factory=dict)
    stays_open: bool = False
    seen: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            page = self.pages.get(request.path, {} if request.path == "/health" else None)
            return web.json_response(page, status=404 if page is None else 200)
        if request.path == "/tokenize":
            return web.Response(status=404)
        self.seen.append(json.loads(await request.read()))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.parts and self.seen[-1].get("stream") is False:
            return web.Response(body=self.parts.pop(0))
        if self.status != 200 or self.body:
            kind = {"Content-Type": "application/json"}
            return web.Response(status=self.status, body=self.body, headers={"Retry-After": "4", **kind})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self.events:
            data = event if isinstance(event, bytes) else json.dumps(event).encode()
            await response.write(b": keep-alive\r\n\r\ndata: " + data + b"\n\n")
        try:
            while self.stays_open:
                await response.write(b": keep-alive\n\n")
                await asyncio.sleep(0.01)
        except ConnectionError:
            self.left.set()
        return response


@asynccontextmanager
async def other_server(**fields: Any) -> AsyncIterator[OtherServer]:  # noqa: ANN401  (the fields of OtherServer)
    server = OtherServer(**fields)
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
