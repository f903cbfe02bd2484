"""A server that gives no token ids: its answers are passed on as they are, byte by byte.

Nothing that needs token ids works behind a relay: a stream that breaks is not continued elsewhere, and nothing is known
of its prefix cache. Every answer is marked with `RELAY_HEADER`, so that a client can tell.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import EngineDiedError
from server.foreign.errors import error_of_answer

if TYPE_CHECKING:
    import aiohttp

RELAY_HEADER = (b"x-headrace-relay", b"text")
PASSED_HEADERS = ("content-type", "cache-control")
MAX_ERROR_BYTES = 64 * 1024


@dataclass(frozen=True)
class RelayedAnswer:
    """`headers` are those that matter to the client, with the mark. Iterate `body` once."""

    headers: tuple[tuple[bytes, bytes], ...]
    body: AsyncIterator[bytes]


class TextRelay:
    """The server at `url`. The session is the caller's; its time-outs hold."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @asynccontextmanager
    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[RelayedAnswer]:
        """Send a client's body and give the answer to pass on; leaving early closes the connection, which ends the
        request there. Raises what an answer other than 200 comes to (server/foreign/errors.py), and EngineDiedError
        for a connection that fails, also in the midst of the body."""
        import aiohttp

        try:
            response = await self._session.post(
                self.url + path, data=body, headers={**(headers or {}), **self._headers}, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineDiedError(f"The connection to the engine failed: {error or type(error).__name__}") from None
        try:
            if response.status != 200:
                told = await response.content.read(MAX_ERROR_BYTES)
                raise error_of_answer(response.status, response.headers.get("Retry-After"), told)
            named = ((name, response.headers.get(name)) for name in PASSED_HEADERS)
            passed = tuple((name.encode(), value.encode("latin-1")) for name, value in named if value is not None)
            yield RelayedAnswer((*passed, RELAY_HEADER), _chunks(response))
        finally:
            response.close()


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    import aiohttp

    try:
        while chunk := await response.content.readany():
            yield chunk
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineDiedError(f"The engine's answer broke off: {error or type(error).__name__}") from None
