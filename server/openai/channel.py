"""The response to one request as it goes out over ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from starlette.types import Send

from engine.errors import HeadraceError
from server.access.record import RequestRecord
from server.errors import reply_to
from server.openai.sse import KEEP_ALIVE

Header = tuple[bytes, bytes]

MAX_HEADER_CHARACTERS = 1024

STREAM_HEADERS: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Channel:
    """The response as it goes out: knows whether the status line is gone, so that an error finds its form."""

    def __init__(self, send: Send, record: RequestRecord) -> None:
        self.record = record
        self._send = send
        self._extra_headers: list[Header] = []
        self._late_headers: list[tuple[bytes, Callable[[], str]]] = []
        self._opening = asyncio.Lock()
        self._streaming = False
        self._ended = False
        self._writes = 0

    def add_header(self, name: bytes, value: str) -> None:
        """Add a header to whatever response comes, cut where it gets long. Characters that a header cannot hold are
        replaced."""
        self._extra_headers.append((name, _clean(value)))

    def add_late_header(self, name: bytes, value: Callable[[], str]) -> None:
        """The same for a value that is asked for when the head of the response is sent."""
        self._late_headers.append((name, value))

    def _added_headers(self) -> list[Header]:
        return [*self._extra_headers, *((name, _clean(value())) for name, value in self._late_headers)]

    async def send_json(self, status: int, body: bytes, headers: Sequence[Header] = ()) -> None:
        self._ended = True
        length = (b"content-length", str(len(body)).encode())
        all_headers = [(b"content-type", b"application/json"), length, *headers, *self._added_headers()]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})
        await self._send({"type": "http.response.body", "body": body})

    async def write(self, data: bytes) -> None:
        """Send part of a stream, opening it if need be."""
        self._writes += 1
        if not self._streaming:
            await self._open()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        """Send the last part of a stream."""
        self._ended = True
        if not self._streaming:
            await self._open()
        await self._send({"type": "http.response.body", "body": data})

    async def fail(self, error: BaseException) -> None:
        """Tell an error in the form that is still possible: a status, an event, or nothing once the answer is out."""
        async with self._opening:
            streaming = self._streaming
        if self._ended:
            return
        reply = reply_to(error)
        self.record.error = error.code if isinstance(error, HeadraceError) else HeadraceError.code
        if streaming:
            await self.end(reply.event)
        else:
            await self.send_json(reply.status, reply.body, reply.headers)

    def keep_alive(self, interval_s: float) -> KeepAlive:
        """Send a comment whenever the stream was silent for an interval, until cancelled."""
        return KeepAlive(self._comment_on_silence, interval_s)

    async def _comment_on_silence(self, seen_writes: int) -> int:
        """Return how many writes there were, for the next call."""
        if self._writes == seen_writes and not self._ended:
            await self.write(KEEP_ALIVE)
        return self._writes

    async def _open(self) -> None:
        async with self._opening:  # the keep-alive and the first piece may both want to
            if not self._streaming:
                headers = STREAM_HEADERS + self._added_headers()
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                self._streaming = True


class KeepAlive:
    """Calls `look` with what it returned last, every `interval_s`. Most streams end within the first interval, so that
    is a timer alone: a task for each would cost more than the timer and all else in here."""

    def __init__(self, look: Callable[[int], Awaitable[int]], interval_s: float) -> None:
        self._look = look
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._begin)

    def cancel(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._go_on())

    async def _go_on(self) -> None:
        seen = await self._look(0)
        while True:
            await asyncio.sleep(self._interval_s)
            seen = await self._look(seen)


def _clean(value: str) -> bytes:
    return "".join(one if " " <= one <= "~" else "?" for one in value[:MAX_HEADER_CHARACTERS]).encode()
