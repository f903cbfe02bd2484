"""The ASGI layer that lets a request in: whose key it has, whether it may use this route, whether there is room, and
whether the key may ask again already.

A route needs a key unless it is listed as open, so that a route which somebody adds is closed at first. Owns the valid
keys and the count of requests under way. Knows nothing of bodies.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import HeadraceError, PressureError
from server.access.credentials import Credentials
from server.access.key_file import KeyFile
from server.access.keys import KeyEntry, KeyRing
from server.access.quota import RateLimiter
from server.access.record import RequestRecord, record_of
from server.config import ServeConfig
from server.debug_header import asks_for_debug
from server.errors import AuthenticationError, ForbiddenError, reply_to

PROBES = frozenset({"/health", "/ready", "/version", "/gateway"})
METRICS = frozenset({"/metrics", "/load"})
ADMIN_PATHS = ("/admin", "/router", "/kv", "/reset_prefix_cache")
ADMIN_PREFIXES = ("/admin/", "/router/", "/kv/")
FORWARDED = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"})


class Keys:
    """The keys of the environment and of the file, which may change. `required` does not: a file that was emptied lets
    nobody in."""

    def __init__(self, credentials: Credentials, config: ServeConfig) -> None:
        self.required = bool(credentials.keys) or config.api_keys_file is not None
        self.admin = KeyRing(KeyEntry(digest, "admin") for digest in credentials.admin_digests)
        self.ring = KeyRing(credentials.keys)
        self._fixed = credentials.keys
        self.file = None if config.api_keys_file is None else KeyFile(Path(config.api_keys_file), self._take)
        if self.file is not None:
            self.file.look()

    @property
    def tenants(self) -> set[str]:
        """Those that have a key now."""
        return self.ring.tenants

    def _take(self, entries: list[KeyEntry]) -> None:
        self.ring = KeyRing([*self._fixed, *entries])


class Guard:
    """`limit` is how many requests may be under way; probes and metrics are let in beyond it, and `limiter` does not
    count them. With `debug_for_all` every client that asks is told where its request went, else only those that may
    use /admin without a key."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        open_metrics: bool,
        limit: int,
        limiter: RateLimiter | None = None,
        debug_for_all: bool = False,
    ) -> None:
        self.app = app
        self._keys = keys
        self._limiter = limiter
        self._open = PROBES | (METRICS if open_metrics else frozenset())
        self._unbounded = PROBES | METRICS
        self._limit = limit
        self._debug_for_all = debug_for_all
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = record_of(scope)
        try:
            self._check(scope, record)
            if record.quota is not None:
                record.quota.take_request()
        except HeadraceError as error:
            await _refuse(_with_limits(send, record), error, record)
            return
        self._running += 1
        try:
            await self.app(scope, receive, _with_limits(send, record))
        finally:
            self._running -= 1

    def _check(self, scope: Scope, record: RequestRecord) -> None:
        path: str = scope["path"]
        if scope["method"] != "OPTIONS" and path not in self._open:
            if path in ADMIN_PATHS or path.startswith(ADMIN_PREFIXES):
                self._check_admin(scope)
            else:
                entry = self._entry(scope) if self._keys.required else None
                record.tenant = None if entry is None else entry.tenant
                if self._limiter is not None and path not in self._unbounded:
                    record.quota = self._limiter.quota_of(entry)
        if self._running >= self._limit and path not in self._unbounded:
            raise PressureError(f"{self._limit} requests are under way already.")
        if asks_for_debug(scope["headers"]):
            is_operator = not len(self._keys.admin) and _is_program_of_this_machine(scope)
            record.debug = self._debug_for_all or is_operator

    def _entry(self, scope: Scope) -> KeyEntry:
        entry = self._keys.ring.find(_bearer(scope))
        if entry is None:
            raise AuthenticationError("The API key is not valid.")
        return entry

    def _check_admin(self, scope: Scope) -> None:
        """Ask for the admin key; where there is none, let in who is on this machine, and is no browser and no proxy."""
        if len(self._keys.admin):
            key = _bearer(scope)
            if self._keys.admin.find(key) is not None:
                return
            if self._keys.ring.find(key) is not None:
                raise ForbiddenError("This API key is no admin key.")
            raise AuthenticationError("The admin key is not valid.")
        if not _is_program_of_this_machine(scope):
            raise ForbiddenError("Without an admin key (--admin-key-file) only programs of this machine may do this.")


def _bearer(scope: Scope) -> bytes:
    given: Sequence[bytes] = [value for name, value in scope["headers"] if name == b"authorization"]
    if not given:
        raise AuthenticationError("An API key is needed: send 'Authorization: Bearer KEY'.")
    scheme, _, key = given[0].strip().partition(b" ")
    if len(given) > 1 or scheme.lower() != b"bearer" or not key.strip():
        raise AuthenticationError("The Authorization header must be one 'Bearer KEY'.")
    return key.strip()


def _is_program_of_this_machine(scope: Scope) -> bool:
    """A page of another site may send a request to this machine, and a proxy makes everybody look local."""
    names = {name for name, _ in scope["headers"]}
    return _is_loopback(scope) and b"origin" not in names and not names & FORWARDED


def _is_loopback(scope: Scope) -> bool:
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0]) if client else None
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address is not None and (mapped or address).is_loopback


def _with_limits(send: Send, record: RequestRecord) -> Send:
    return send if record.quota is None else record.quota.told_in(send)


async def _refuse(send: Send, error: HeadraceError, record: RequestRecord) -> None:
    record.error = error.code
    reply = reply_to(error)
    length = (b"content-length", str(len(reply.body)).encode())
    headers = [(b"content-type", b"application/json"), length, *reply.headers]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
