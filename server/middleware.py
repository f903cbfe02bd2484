"""The outermost ASGI layer: request id, request counter and log lines. Costs one call per message, no task, no copy."""

from __future__ import annotations

import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.access.log import AccessLog
from server.access.priority import priority_of
from server.access.record import RequestRecord, attach_record
from server.access.session import session_of
from server.access.trace import trace_of
from server.kv_orders import KV_GETS, KV_POSTS, RESET_PATHS
from server.logs import PROBE_PATHS, log_request
from server.metrics import ServerMetrics

SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}\Z")
"""Ids that are safe in headers and logs; another id of the client's is replaced."""

KNOWN_ROUTES = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready", "/version", "/metrics", "/load"}
    | {"/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"}
    | {"/admin/drain", "/admin/abort", "/admin/reset_prefix_cache", "/router/workers", "/router/explain", "/gateway"}
    | {*KV_GETS, *KV_POSTS, *RESET_PATHS}
)
CLIENT_LEFT = "499"


class EdgeMiddleware:
    """Puts x-request-id on every response and counts it by route and status."""

    def __init__(self, app: ASGIApp, *, metrics: ServerMetrics, access_log: AccessLog | None = None) -> None:
        self.app = app
        self.access_log = access_log
        self.requests = metrics.http_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(scope)
        headers = scope["headers"]
        record = RequestRecord(
            request_id, trace=trace_of(headers), session=session_of(headers), priority=priority_of(headers)
        )
        attach_record(scope, record)
        status = CLIENT_LEFT
        started = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self.app(_as_get(scope), receive, send_with_id)
        finally:
            path, duration_s = scope["path"], time.perf_counter() - started
            self.requests.labels(_route(path), status).inc()
            log_request(scope["method"], path, status, duration_s, request_id)
            if self.access_log is not None and path not in PROBE_PATHS:
                self.access_log.write(
                    record, method=scope["method"], route=_route(path), status=int(status), duration_s=duration_s
                )


def _as_get(scope: Scope) -> Scope:
    """HEAD is GET whose body the connection keeps to itself: uptime checks ask so."""
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and SANE_ID.match(value):
            return str(value, "ascii")
    return f"req-{secrets.token_hex(16)}"


def _route(path: str) -> str:
    """The label of a path: paths are the client's to choose, labels are not."""
    if path in KNOWN_ROUTES:
        return path
    return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"
