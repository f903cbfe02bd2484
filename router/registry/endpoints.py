"""Records that workers and gateways tell over their own HTTP ports: GET /worker and GET /gateway.

Engines of other makes tell no record: one is made of the models that they list.

For registries that know addresses only. A base URL that does not answer keeps the record that it told last: whether a
worker is alive, its wire tells better than a poll.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from engine.errors import ConfigError
from router.registry.base import Dialect, GatewayRecord, WorkerRecord
from router.registry.records import (
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    RecordError,
    Sieve,
    check_record,
    decode_record,
    split_worker_url,
)

if TYPE_CHECKING:
    import aiohttp

R = TypeVar("R", WorkerRecord, GatewayRecord)

POLL_INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 2.0
POLLS_AT_ONCE = 32

MODELS_PATH = "/v1/models"

PATHS: dict[type[WorkerRecord] | type[GatewayRecord], str] = {WorkerRecord: "/worker", GatewayRecord: "/gateway"}


def require_http() -> None:
    """Raise ConfigError where aiohttp is missing."""
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise ConfigError(
            "This registry needs aiohttp, which is not installed.", hint="Run: pip install 'headrace[fleet]'"
        ) from None


def open_http() -> aiohttp.ClientSession:
    """Return a session that goes through no proxy and keeps no cookies. Raises ConfigError where aiohttp is missing."""
    require_http()
    import aiohttp

    return aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), trust_env=False)


class Endpoints(Generic[R]):
    """Polls a set of base URLs, which may change between two polls."""

    def __init__(self, session: aiohttp.ClientSession, kind: type[R]) -> None:
        self._session = session
        self._kind: type[R] = kind
        self._sieve = Sieve()
        self._last: dict[str, R] = {}
        self._slots = asyncio.Semaphore(POLLS_AT_ONCE)

    async def poll(self, urls: Iterable[str]) -> tuple[tuple[str, R], ...]:
        """Ask all at once; return (URL, record) of those that have ever told one. Unknown others are left out."""
        listed = list(dict.fromkeys(urls))[:MAX_RECORDS]
        self._last = {url: record for url, record in self._last.items() if url in set(listed)}
        await asyncio.gather(*map(self._ask, listed))
        return tuple((url, self._last[url]) for url in listed if url in self._last)

    async def _ask(self, url: str) -> None:
        import aiohttp

        async with self._slots:
            try:
                timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
                dialect, base = split_worker_url(url)
                address = base.rstrip("/") + (PATHS[self._kind] if dialect == "headrace" else MODELS_PATH)
                async with self._session.get(address, timeout=timeout, allow_redirects=False) as response:
                    if response.status != 200:
                        return self._complain(url, f"it answers with status {response.status}")
                    body = await _body(response)
                ours = dialect == "headrace"
                record = decode_record(body, self._kind) if ours else _other_record(base, dialect, body)
                assert isinstance(record, self._kind), "only workers have such addresses"
                self._last[url] = record
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._complain(url, f"it does not answer ({type(error).__name__})")
            except RecordError as error:
                self._complain(url, error)

    def _complain(self, url: str, reason: object) -> None:
        """What was told before goes on to count: see the module's docstring."""
        self._sieve.complain(url, reason, what="no record could be read")


class Card(msgspec.Struct, frozen=True):
    id: str


class Cards(msgspec.Struct, frozen=True):
    data: list[Card]


def _other_record(base: str, dialect: Dialect, body: bytes) -> WorkerRecord:
    """Return the record of a server for the first model that it lists. Raises RecordError."""
    try:
        cards = msgspec.json.decode(body, type=Cards).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"it lists no models: {str(error)[:200]}") from None
    if not cards:
        raise RecordError("it lists no models")
    worker_id = re.sub(r"[^A-Za-z0-9._:-]", "-", base.partition("://")[2])[:128]
    record = WorkerRecord(worker_id=worker_id, model=cards[0].id, http_url=base, dialect=dialect)
    check_record(record)
    return record


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """Read a body of a record's size at most, and no more of any other."""
    body = bytearray()
    while chunk := await response.content.readany():
        body += chunk
        if len(body) > MAX_RECORD_BYTES:
            raise RecordError(f"it is larger than {MAX_RECORD_BYTES} bytes")
    return bytes(body)
