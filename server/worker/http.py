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

from engine.errors import HeadraceError, RequestError, UnsupportedError
from engine.kv.store_orders import StoreAdmin
from engine.protocol import EngineLoad
from kvstore.keys import PUBLIC_SCOPE
from router.registry.base import WorkerRecord
from server.access.credentials import Credentials
from server.access.guard import Guard, Keys
from server.access.record import RequestRecord, attach_record
from server.config import ServeConfig
from server.errors import reply_to
from server.fleet.link import target_id
from server.health import ServiceState
from server.kv_orders import KV_GETS, KV_POSTS, RESET_PATHS
from server.kv_routes import ask_all
from server.metrics import CONTENT_TYPE
from server.version import VERSION
from server.worker.metrics import exposition
from server.worker.rank import Rank

MAX_REQUESTS = 256
MAX_BODY_BYTES = 16 * 1024 * 1024
"""A million token ids."""


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

    async def order_kv(request: Request) -> Response:
        read = (KV_GETS if request.method == "GET" else KV_POSTS)[request.url.path]
        _, order = await read(await _body(request), WorkerNames())
        return _json(await ask_all(_stores(worker), request.query_params.get("worker"), lambda e: e.order_store(order)))

    async def reset_kv(request: Request) -> Response:
        worker_named = request.query_params.get("worker")
        return _json(await ask_all(_stores(worker), worker_named, lambda engine: engine.reset_prefix_cache()))

    gets.update(dict.fromkeys(KV_GETS, order_kv))
    posts = {
        "/admin/drain": drain,
        "/admin/reset_prefix_cache": reset_prefix_cache,
        **dict.fromkeys(KV_POSTS, order_kv),
        **dict.fromkeys(RESET_PATHS, reset_kv),
    }
    keys = Keys(Credentials(admin_digests=tuple(admin_digests)), ServeConfig())
    return Starlette(
        routes=[
            *(Route(path, answer, methods=["GET"]) for path, answer in gets.items()),
            *(Route(path, answer, methods=["POST"]) for path, answer in posts.items()),
        ],
        middleware=[Middleware(Recorded), Middleware(Guard, keys=keys, open_metrics=True, limit=MAX_REQUESTS)],
        exception_handlers={HeadraceError: _answer_error, HTTPException: _answer_error, Exception: _answer_error},
    )


class WorkerNames:
    """The `Names` of a process that knows neither text nor tenants: prompts are token ids, and a scope is hex."""

    async def tokens(self, model: str | None, prompt: str) -> Sequence[int]:
        raise UnsupportedError("A worker's port has no text: give 'token_ids'.", param="prompt")

    def scope(self, tenant: str | None, salt: str | None) -> bytes:
        for param, value in (("tenant", tenant), ("cache_salt", salt)):
            if value is not None:
                raise UnsupportedError(
                    "A worker's port knows no tenants: give 'scope' or 'owner', or ask a gateway.", param=param
                )
        return PUBLIC_SCOPE


def _stores(worker: WorkerView) -> dict[str, StoreAdmin]:
    """Return the ranks by the ids that they have as targets."""
    return {target_id(worker.record.worker_id, rank.number): rank.engine for rank in worker.ranks}


async def _body(request: Request) -> bytes:
    """Return the whole body. Raises RequestError for one that is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(f"The body is larger than {MAX_BODY_BYTES} bytes.", code="request_too_large")
    return bytes(body)


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
