"""One POST at another server, whose answer is read as it comes. It can be ended from this side at any moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Literal, TypeVar

from engine.errors import DeadlineError, EngineDiedError, EngineSilentError
from server.foreign.errors import error_of_answer

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

MAX_ERROR_BYTES = 64 * 1024

EndedBy = Literal["finish", "abort", "closed", "silent"]


class ExchangeEnded(Exception):
    """It was ended from this side; `Exchange.ended_by` says how, None for its deadline."""


class Exchange:
    """`deadline_unix_s` is of the wall clock, None for none. Every wait raises ExchangeEnded once it is to end, and
    EngineDiedError for a connection that fails."""

    def __init__(self, deadline_unix_s: float | None) -> None:
        self.ended_by: EndedBy | None = None
        self.bytes_read = 0
        self._deadline_unix_s = deadline_unix_s
        self._response: aiohttp.ClientResponse | None = None
        self._cut: asyncio.Timeout | None = None

    async def post(self, session: aiohttp.ClientSession, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Send the request. Raises what an answer other than 200 comes to (server/foreign/errors.py)."""
        all_headers = {"Content-Type": "application/json", **headers}
        response = await self._wait(session.post(url, data=body, headers=all_headers, allow_redirects=False))
        self._response = response
        if response.status != 200:
            told = await self._wait(response.content.read(MAX_ERROR_BYTES))
            raise error_of_answer(response.status, response.headers.get("Retry-After"), told)

    @property
    def content_type(self) -> str:
        """Of the answer that has begun, without parameters."""
        assert self._response is not None
        return self._response.content_type

    async def read(self) -> bytes | None:
        """Return the next bytes of the answer, None at its end."""
        assert self._response is not None
        if self.ended_by is not None:
            raise ExchangeEnded
        data = await self._wait(self._response.content.readany())
        self.bytes_read += len(data)
        return data or None

    def end(self, cause: EndedBy) -> None:
        """Interrupt whatever it waits for."""
        self.ended_by = self.ended_by or cause
        if self._cut is not None:
            self._cut.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """The server takes a closed connection for a client that left, and ends the request."""
        if self._response is not None:
            self._response.close()

    def raise_unless_wanted(self) -> None:
        """Raise what an end means that the client did not ask for."""
        match self.ended_by:
            case None:
                raise DeadlineError("The request's deadline passed before it finished.")
            case "closed":
                raise EngineDiedError("The connection to the engine was closed.")
            case "silent":
                raise EngineSilentError("The engine has not answered for too long.")

    async def _wait(self, step: Awaitable[T]) -> T:
        import aiohttp

        deadline = self._deadline_unix_s
        left_s = None if deadline is None else max(0.0, deadline - time.time())
        try:
            async with asyncio.timeout(0 if self.ended_by else left_s) as self._cut:
                return await step
        except TimeoutError as error:
            if self._cut is not None and self._cut.expired():
                raise ExchangeEnded from None
            raise EngineDiedError(f"The engine does not answer: {error or type(error).__name__}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineDiedError(f"The connection to the engine failed: {error or type(error).__name__}") from None
        finally:
            self._cut = None
