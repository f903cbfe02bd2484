"""What operators may ask of the router: /router/workers and /router/explain. The guard treats them like /admin."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.errors import RequestError
from router.decision import REMEMBERED_DECISIONS, Decision
from router.member import TargetStatus
from router.registry.base import GatewayRecord
from router.values import Role
from server.errors import UnknownRequestError
from server.fleet.fleet import Fleet
from server.fleet.link import FleetLink


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. `connection` is the state of its engine as its connection knows it; `status` is None for one that may
    not serve; `pid` is of the engine's process, on the machine that it runs on."""

    target_id: str
    worker_id: str
    dp_rank: int
    model: str
    role: Role
    connection: str
    pid: int | None
    digest: str | None
    numerics: str | None
    status: TargetStatus | None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions about one request, the oldest first. Each process remembers its own last ones, and asks the others
    about what it has not had itself."""

    request_id: str
    decisions: list[Decision]


def gateway_route(own: GatewayRecord) -> APIRouter:
    """Where registries without a memory of their own read this process's record."""
    router = APIRouter()

    @router.get("/gateway", summary="Where other gateways learn of this one's dispatches")
    async def gateway(request: Request) -> Response:
        return _json(own)

    return router


def fleet_routes(fleet: Fleet) -> APIRouter:
    router = APIRouter(prefix="/router")

    @router.get("/workers", summary="Every engine that is connected to: state, load, and what is under way")
    async def workers(request: Request) -> Response:
        statuses = {one.target_id: one for pool in fleet.pools.values() for one in pool.pool.dispatcher.status()}
        return _json([_view(link, statuses.get(link.target_id)) for link in fleet.links])

    @router.get("/explain", summary="Why a request went where it went")
    async def explain(request: Request) -> Response:
        request_id = request.query_params.get("request_id", "")
        if not request_id:
            raise RequestError("Which request? Give its id.", param="request_id", code="missing_required_parameter")
        decisions, silent = await fleet.explain(request_id)
        if not decisions:
            unknown = f", but {silent} did not answer" if silent else ""
            raise UnknownRequestError(
                f"No process that could be asked remembers this request{unknown}."
                f" Each keeps its last {REMEMBERED_DECISIONS} decisions.",
                param="request_id",
                value=request_id,
            )
        return _json(Explanation(request_id=request_id, decisions=decisions))

    return router


def _view(link: FleetLink, status: TargetStatus | None) -> WorkerView:
    info = link.info
    return WorkerView(
        target_id=link.target_id,
        worker_id=link.record.worker_id,
        dp_rank=link.dp_rank,
        model=link.record.model,
        role=link.record.role,
        connection=link.engine.state().state,
        pid=None if info is None else info.pid or None,
        digest=link.digest,
        numerics=None if info is None else info.numerics_fingerprint,
        status=status,
    )


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
