"""Records that workers and gateways tell over their own HTTP ports: GET /worker and GET /gateway.

For registries that know addresses only. A base URL that does not answer keeps the record that it told last: whether a
worker is alive, its wire tells better than a poll.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

from engine.errors import ConfigError
from router.registry.base import GatewayRecord, WorkerRecord
from router.registry.records import MAX_RECORD_BYTES, MAX_RECORDS, RecordError, Sieve, decode_record

if TYPE_CHECKING:
    import aiohttp

R = TypeVar("R", WorkerRecord, GatewayRecord)

POLL_INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 2.0
POLLS_AT_ONCE = 32

PATHS: dict[type[WorkerRecord] | type[GatewayRecord], str] = {WorkerRecord: "/worker", GatewayRecord: "/gateway"}


def open_http() -> aiohttp.ClientSession:
    """Return a session that goes through no proxy and keeps no cookies. Raises ConfigError where aiohttp is missing."""
    try:
        import aiohttp
    except ImportError:
        raise ConfigError(
            "This registry needs aiohttp, which is not installed.", hint="Run: pip install 'headrace[fleet]'"
        ) from None
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
                address = url.rstrip("/") + PATHS[self._kind]
                async with self._session.get(address, timeout=timeout, allow_redirects=False) as response:
                    if response.status != 200:
                        return self._sieve.complain(url, f"it answers with status {response.status}")
                    self._last[url] = decode_record(await _body(response), self._kind)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._sieve.complain(url, f"it does not answer ({type(error).__name__})")
            except RecordError as error:
                self._sieve.complain(url, error)


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """Read a body of a record's size at most, and no more of any other."""
    body = bytearray()
    while chunk := await response.content.readany():
        body += chunk
        if len(body) > MAX_RECORD_BYTES:
            raise RecordError(f"it is larger than {MAX_RECORD_BYTES} bytes")
    return bytes(body)
