"""The HTTP application: routes, error answers and the lifespan of what they share. Everything below is an `Engine`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from engine.errors import HeadraceError
from engine.protocol import EngineLoad
from server.access.credentials import Credentials
from server.access.guard import Guard, Keys
from server.access.log import AccessLog
from server.access.quota import RateLimiter
from server.access.usage_table import Limits, UsageTable
from server.admin import ADMIN_ROUTES
from server.config import ServeConfig
from server.errors import reply_to
from server.health import health_routes
from server.kv_routes import kv_routes
from server.metrics import CONTENT_TYPE
from server.middleware import EdgeMiddleware
from server.openai.chat import prepare_chat
from server.openai.completions import prepare_completion
from server.openai.exchange import GenerateEndpoint
from server.openai.json_endpoint import JsonEndpoint
from server.openai.models import model_routes
from server.openai.schema import describe_bodies
from server.openai.tokenize import TEXT_ROUTES
from server.service import Models, Service
from server.short_cut import ShortCut
from server.version import VERSION

SCRAPE_TIMEOUT_S = 2.0
"""Of the engine's part of /metrics: a busy engine costs a scrape its gauges, not its answer."""


class Application(FastAPI):
    """The framework with our layers around all of its own, `layers[-1]` outermost: requests that take the short cut pay
    for none of them, and the outermost layer sees the answers to faults that nobody foresaw as well."""

    layers: Sequence[Callable[[ASGIApp], ASGIApp]] = ()

    def build_middleware_stack(self) -> ASGIApp:
        app = super().build_middleware_stack()
        for layer in self.layers:
            app = layer(app)
        return app


def build_app(
    models: Models, *, config: ServeConfig, credentials: Credentials | None = None, usage: UsageTable | None = None
) -> FastAPI:
    """Return the application. It answers at once; model routes are refused until a model is ready.

    `app.state.service` holds the Service, whose `traffic.drain()` the process calls when it is told to end.
    `credentials` have the keys and the secret that keeps caches apart; processes of one server share them, and `usage`,
    which is the caller's to close.
    """
    credentials = credentials or Credentials()
    service = Service(models, config, bytes.fromhex(credentials.scope_secret))
    keys = Keys(credentials, config)
    if keys.required:
        service.tenants = lambda: keys.tenants
    defaults = Limits(requests=config.requests_per_minute, tokens=config.tokens_per_minute)
    limiter = RateLimiter(usage or UsageTable(), defaults, lambda kind: service.metrics.rate_limited.labels(kind).inc())
    access_log = None if config.access_log is None else AccessLog(config.access_log)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await models.start()
        watch = None if keys.file is None else asyncio.create_task(keys.file.watch())
        yield
        if watch is not None:
            watch.cancel()
        await models.close()
        if access_log is not None:
            await asyncio.to_thread(access_log.close)

    # The framework's pages about /openapi.json load their scripts from a foreign host. Its telemetry asks its library
    # three times for each request whether somebody has set it up, which nobody has.
    app = Application(
        title="Headrace",
        version=VERSION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.service = service
    endpoints = {
        "/v1/chat/completions": GenerateEndpoint(service, prepare_chat),
        "/v1/completions": GenerateEndpoint(service, prepare_completion),
    }
    for path, endpoint in endpoints.items():
        # An ASGI application of its own: the framework would read the body and build a response before the answer.
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    for path, answer in TEXT_ROUTES.items():
        app.router.routes.append(Route(path, JsonEndpoint(service, answer), methods=["POST"]))
    for path, answer in ADMIN_ROUTES.items():
        app.router.routes.append(Route(path, JsonEndpoint(service, answer, needs_model=False), methods=["POST"]))
    app.router.routes.extend(kv_routes(service))
    app.include_router(model_routes(service))
    app.include_router(health_routes(service))
    app.include_router(_metrics_route(service))
    for error in (HeadraceError, HTTPException, Exception):
        app.add_exception_handler(error, _answer_error)
    limit = config.share(config.max_concurrent_requests)
    app.layers = [
        partial(ShortCut, endpoints=endpoints),
        partial(
            Guard,
            keys=keys,
            open_metrics=config.open_metrics,
            limit=limit,
            limiter=limiter,
            debug_for_all=config.debug_header,
        ),
        partial(EdgeMiddleware, metrics=service.metrics, access_log=access_log),
    ]
    describe_bodies(app)
    return app


def _metrics_route(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics", summary="Prometheus metrics")
    async def metrics(request: Request) -> Response:
        load: EngineLoad | None = None
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                load = await service.load()
        except (HeadraceError, TimeoutError):
            pass  # loading, restarting or busy: the HTTP layer's own metrics are still worth having
        others = [model.collector for model in service.models.served() if model.collector is not None]
        return Response(service.metrics.scrape(load, others), headers={"content-type": CONTENT_TYPE})

    return router


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 404:
        error = HTTPException(404, f"Unknown request URL: {request.method} {request.url.path}.")
    reply = reply_to(error)
    response = Response(reply.body, reply.status, media_type="application/json")
    response.raw_headers.extend(reply.headers)
    return response
