"""A worker's small HTTP port: health, readiness, metrics, its record, and what an operator may ask of it.

Requests for tokens do not come here, they go over the wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import HeadraceError
from engine.protocol import EngineLoad
from router.registry.base import WorkerRecord
from server.access.credentials import Credentials
from server.access.guard import Guard, Keys
from server.access.record import RequestRecord, attach_record
from server.config import ServeConfig
from server.errors import reply_to
from server.health import ServiceState
from server.metrics import CONTENT_TYPE
from server.version import VERSION
from server.worker.metrics import exposition
from server.worker.rank import Rank

MAX_REQUESTS = 256


class WorkerView(Protocol):
    """What the port tells of a worker, and the one thing that it asks of it as a whole."""

    @property
    def ranks(self) -> Sequence[Rank]: ...

    @property
    def record(self) -> WorkerRecord: ...

    def service_state(self) -> ServiceState: ...

    async def drain(self) -> None: ...


def build_app(worker: WorkerView, admin_digests: Sequence[str]) -> Starlette:
    """Return the application. /admin is open to the admin key, or without one to programs of this machine."""

    async def health(request: Request) -> Response:
        state = worker.service_state()
        return _json(state, 200 if state.status in ("ready", "draining") else 503)

    async def ready(request: Request) -> Response:
        state = worker.service_state()
        return _json(state, 200 if state.status == "ready" else 503)

    async def version(request: Request) -> Response:
        return _json({"version": VERSION})

    async def record(request: Request) -> Response:
        return _json(worker.record)

    async def load(request: Request) -> Response:
        loads: dict[str, EngineLoad | None] = {str(rank.number): rank.load for rank in worker.ranks}
        return _json(loads)

    async def metrics(request: Request) -> Response:
        return Response(exposition(worker.ranks), headers={"content-type": CONTENT_TYPE})

    async def drain(request: Request) -> Response:
        await worker.drain()
        return _json({"status": "draining"})

    async def reset_prefix_cache(request: Request) -> Response:
        await asyncio.gather(*(rank.engine.reset_prefix_cache() for rank in worker.ranks))
        return _json({"status": "ok"})

    gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/health": health,
        "/ready": ready,
        "/version": version,
        "/worker": record,
        "/load": load,
        "/metrics": metrics,
    }
    posts = {"/admin/drain": drain, "/admin/reset_prefix_cache": reset_prefix_cache}
    keys = Keys(Credentials(admin_digests=tuple(admin_digests)), ServeConfig())
    return Starlette(
        routes=[
            *(Route(path, answer, methods=["GET"]) for path, answer in gets.items()),
            *(Route(path, answer, methods=["POST"]) for path, answer in posts.items()),
        ],
        middleware=[Middleware(Recorded), Middleware(Guard, keys=keys, open_metrics=True, limit=MAX_REQUESTS)],
        exception_handlers={HeadraceError: _answer_error, HTTPException: _answer_error, Exception: _answer_error},
    )


class Recorded:
    """Gives every request the record that the guard writes to."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        attach_record(scope, RequestRecord(""))
        await self.app(scope, receive, send)


class Server(uvicorn.Server):
    """uvicorn without its own mind about signals: the worker ends it, after everything else."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                ws="none",
                lifespan="off",
                proxy_headers=False,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _json(value: object, status: int = 200) -> Response:
    headers = {"retry-after": "1"} if status == 503 else {}
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def _answer_error(request: Request, error: Exception) -> Response:
    reply = reply_to(error)
    response = Response(reply.body, reply.status, media_type="application/json")
    response.raw_headers.extend(reply.headers)
    return response
