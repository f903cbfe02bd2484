"""What state the server is in, and the routes that tell it: /health, /ready, /version, /load.

/health answers 200 only while the engine can serve; until then 503 with the progress. /ready adds the drain: a load
balancer takes the server out as soon as it turns 503, while running streams go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, get_args

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.version import VERSION

if TYPE_CHECKING:
    from server.service import Service

Status = Literal["ready", "draining", "restarting", "loading", "failed"]
STATUSES: tuple[Status, ...] = get_args(Status)
"""Best first."""


class ServiceState(msgspec.Struct, frozen=True, omit_defaults=True):
    """`progress` in [0, 1] is of loading or restarting, `error` of a failure that waiting does not cure."""

    status: Status
    progress: float | None = None
    error: str | None = None


class Readiness(Protocol):
    """Who knows how the engine is doing: a remote engine's supervisor, or a fake in tests."""

    def state(self) -> ServiceState: ...

    async def wait_ready(self) -> None:
        """Return when the engine can be asked to describe itself."""
        ...


def _json(value: object, status: int = 200, *, retry_after_s: int | None = None) -> Response:
    headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def health_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health", summary="503 with the progress until the engine can serve")
    async def health(request: Request) -> Response:
        state = service.state()
        alive = state.status in ("ready", "draining")
        return _json(state) if alive else _json(state, 503, retry_after_s=1)

    @router.get("/ready", summary="503 while loading, restarting or draining")
    async def ready(request: Request) -> Response:
        state = service.state()
        return _json(state) if state.status == "ready" else _json(state, 503, retry_after_s=1)

    @router.get("/version")
    async def get_version(request: Request) -> Response:
        return _json({"version": VERSION})

    @router.get("/load", summary="What the engine is doing now")
    async def load(request: Request) -> Response:
        return _json(await service.load())

    return router
