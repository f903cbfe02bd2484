"""The EndpointSlices of one service, kept up to date: list, then watch from the list's version on.

https://kubernetes.io/docs/reference/using-api/api-concepts/ (resource versions, bookmarks, 410 Gone, chunked lists).
Knows nothing of workers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import msgspec

from router.registry.kubernetes_access import KubernetesAccess

if TYPE_CHECKING:
    import aiohttp

S = TypeVar("S")

PAGE_SLICES = 100
MAX_SLICES = 4_096
MAX_LINE_BYTES = 8 * 1024 * 1024
WATCH_S = 60
"""After so long the server ends a watch. Short: a connection that died without a word is noticed a little later."""

ANSWER_TIMEOUT_S = 10.0


class Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Endpoint(msgspec.Struct, frozen=True):
    addresses: list[str] | None = None
    conditions: Conditions | None = None


class Port(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class Metadata(msgspec.Struct, frozen=True):
    name: str = ""
    resource_version: str = msgspec.field(default="", name="resourceVersion")
    next_page: str = msgspec.field(default="", name="continue")


class Slice(msgspec.Struct, frozen=True):
    metadata: Metadata = Metadata()
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None


class SliceList(msgspec.Struct, frozen=True):
    metadata: Metadata = Metadata()
    items: list[Slice] | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class ApiError(Exception):
    """The API server answered with something else than what was asked for. It is asked again later."""


class GoneError(Exception):
    """The version that a watch was to go on from is too old: only a new list tells what there is."""


@dataclass(frozen=True)
class Address:
    """Where one endpoint listens. One that is `terminating` is on its way out, and may still be busy."""

    host: str
    port: int
    terminating: bool

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class SliceWatch:
    """`on_change` is called whenever `addresses` may have changed. `follow` is to be called again after any error but
    goes on where it was."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        access: KubernetesAccess,
        namespace: str,
        service: str,
        port: str,
        on_change: Callable[[], None],
    ) -> None:
        self._session = session
        self._access = access
        self._url = f"{access.url}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = {"labelSelector": f"kubernetes.io/service-name={service}"}
        self._tls = access.tls()
        self._port = port
        self._on_change = on_change
        self._slices: dict[str, Slice] = {}
        self._version: str | None = None

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Every address once, also when several slices have it; terminating only if it is so in all of them."""
        found: dict[tuple[str, int], Address] = {}
        for one in self._slices.values():
            for address in self._addresses_of(one):
                key = (address.host, address.port)
                if key not in found or not address.terminating:
                    found[key] = address
        return tuple(found[key] for key in sorted(found))

    async def follow(self, on_reached: Callable[[], None]) -> None:
        """List if need be, then watch until the server ends the watch."""
        if self._version is None:
            self._version = await self._list()
            self._on_change()
        on_reached()
        try:
            await self._watch(self._version)
        except GoneError:
            self._version = None

    async def _list(self) -> str:
        slices: dict[str, Slice] = {}
        page = ""
        while True:
            parameters = {**self._selector, "limit": str(PAGE_SLICES), **({"continue": page} if page else {})}
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
            async with self._get(parameters, timeout) as response:
                body = b"".join([line async for line in _lines(response)])
                if response.status != 200:
                    raise ApiError(f"status {response.status}: {_message(body)}")
            listed = _decoded(body, SliceList)
            for one in listed.items or ():
                if len(slices) < MAX_SLICES:
                    slices[one.metadata.name] = one
            page = listed.metadata.next_page
            if not page:
                self._slices = slices
                return listed.metadata.resource_version

    async def _watch(self, version: str) -> None:
        import aiohttp

        began = monotonic()
        events = 0
        parameters = {
            **self._selector,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_TIMEOUT_S, sock_read=WATCH_S + ANSWER_TIMEOUT_S)
        async with self._get(parameters, timeout) as response:
            if response.status == 410:
                raise GoneError
            if response.status != 200:
                raise ApiError(f"status {response.status}: {_message(await response.content.read(65536))}")
            async for line in _lines(response):
                events += 1
                self._take(_decoded(line, WatchEvent))
        if not events and monotonic() - began < 1.0:
            raise ApiError("the watch ended at once")

    def _take(self, event: WatchEvent) -> None:
        if event.type == "ERROR":
            status = _decoded(event.object, Status)
            if status.code == 410:
                raise GoneError
            raise ApiError(f"code {status.code}: {status.message[:200]}")
        changed = _decoded(event.object, Slice)
        name = changed.metadata.name
        if event.type == "DELETED":
            self._slices.pop(name, None)
        elif event.type in ("ADDED", "MODIFIED") and (name in self._slices or len(self._slices) < MAX_SLICES):
            self._slices[name] = changed
        if changed.metadata.resource_version:
            self._version = changed.metadata.resource_version
        if event.type != "BOOKMARK":
            self._on_change()

    def _get(self, parameters: dict[str, str], timeout: aiohttp.ClientTimeout) -> aiohttp.client._RequestContextManager:
        return self._session.get(
            self._url,
            params=parameters,
            headers=self._access.headers(),
            ssl=self._tls,
            timeout=timeout,
            allow_redirects=False,
        )

    def _addresses_of(self, one: Slice) -> list[Address]:
        numbers = [port.port for port in one.ports or () if port.port and self._port in (port.name, str(port.port))]
        if not numbers:
            return []
        return [
            Address(host, numbers[0], bool(endpoint.conditions and endpoint.conditions.terminating))
            for endpoint in one.endpoints or ()
            for host in (endpoint.addresses or ())[:1]  # the others are said to be the same endpoint
            if _is_ip(host) and 0 < numbers[0] < 65536
        ]


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the lines of a body as they come, none of them longer than the limit."""
    rest = bytearray()
    while chunk := await response.content.readany():
        rest += chunk
        if b"\n" in chunk:
            *whole, tail = bytes(rest).split(b"\n")
            rest = bytearray(tail)
            for line in whole:
                if line.strip():
                    yield line
        if len(rest) > MAX_LINE_BYTES:
            raise ApiError(f"a line is longer than {MAX_LINE_BYTES} bytes")
    if rest.strip():
        yield bytes(rest)


def _decoded(data: bytes | msgspec.Raw, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"this is no {kind.__name__}: {str(error)[:200]}") from None


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=Status).message[:200]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return repr(body[:100])


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
