"""Reads the body of a request: bounded in bytes and in time, and together with all others in memory. Parses nothing."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope

from engine.errors import PressureError, RequestError
from server.errors import BodyTooLargeError, BodyTooSlowError, ClientGoneError

BODY_TIMEOUT_S = 300.0
"""From the end of the headers to the end of the body: what fits the limit takes two minutes at 1 Mbit/s."""
HELD_BODIES = 16
"""How many bodies of the largest size a process holds at once, while they are read and until they are parsed."""
FREE_BYTES = 64 * 1024
"""Of each body, which are always to be had: large bodies that take their time must not keep small ones out."""
DISCARD_FACTOR = 4
"""How much of a too large body is read and dropped, in limits, so that its sender gets to read the answer."""


class BodyMemory:
    """Bounds the bytes of all bodies that a process holds at once."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.held_bytes = 0
        self._capacity_bytes = HELD_BODIES * max_body_bytes

    def take(self, size: int) -> None:
        if self.held_bytes + size > self._capacity_bytes:
            raise PressureError("The server is reading too many large requests.", retry_after_s=5.0)
        self.held_bytes += size

    def give_back(self, size: int) -> None:
        self.held_bytes -= size


class Body:
    """The body of one request while it is read and until it is parsed. `release` returns its memory."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._data = bytearray()
        self._taken_bytes = 0

    async def read(self, scope: Scope, receive: Receive) -> None:
        """Read at most the limit, however the body is framed.

        Raises RequestError, PressureError, and ClientGoneError when it breaks off.
        """
        _check_content_headers(scope)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                await self._read(receive)
        except TimeoutError:
            raise BodyTooSlowError(BODY_TIMEOUT_S) from None

    async def _read(self, receive: Receive) -> None:
        limit_bytes, seen_bytes = self._memory.max_body_bytes, 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError("The client closed its connection inside the body.")
            part = message.get("body", b"")
            seen_bytes += len(part)
            if seen_bytes <= limit_bytes:
                self._keep(part)
            else:
                self.release()
            more = message.get("more_body", False)
            if seen_bytes > limit_bytes and (not more or seen_bytes > limit_bytes * DISCARD_FACTOR):
                raise BodyTooLargeError(limit_bytes)
            if not more:
                return

    def _keep(self, part: bytes) -> None:
        self._data += part
        more = len(self._data) - FREE_BYTES - self._taken_bytes
        if more > 0:
            self._memory.take(more)
            self._taken_bytes += more

    def take(self) -> bytes:
        """Return the bytes, which are then the caller's alone; they count until `release`."""
        data, self._data = self._data, bytearray()
        return bytes(data)

    def release(self) -> None:
        self._data = bytearray()
        self._memory.give_back(self._taken_bytes)
        self._taken_bytes = 0


def _check_content_headers(scope: Scope) -> None:
    for name, value in scope["headers"]:
        if name == b"content-type":
            _check_content_type(value)
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise RequestError(
                f"The content encoding '{_shown(value)}' is not supported: send the body as it is.",
                code="unsupported_content_encoding",
            )


def _check_content_type(value: bytes) -> None:
    """JSON or no type at all. Forms and plain text are what other sites' pages can make a browser send."""
    kind = value.split(b";")[0].strip().lower()
    if kind not in (b"", b"application/json") and not kind.endswith(b"+json"):
        raise RequestError(
            f"The content type '{_shown(kind)}' is not supported: send 'Content-Type: application/json'.",
            code="unsupported_content_type",
        )


def _shown(header: bytes) -> str:
    return header[:80].decode("latin-1")
