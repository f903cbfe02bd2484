"""The running requests of a client: which there are, and whose outputs come. Knows no sockets and no states."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from engine.errors import EngineDiedError, HeadraceError, PressureError, RequestError, RequestFailedError
from engine.protocol import GenerateRequest, TokenOutput
from engine.wire import messages as wire

MAX_STREAMS = 16_384
"""Bounds what a stuck engine can make this process hold."""


class Stream:
    """One running attempt. It stays known after its end here until the engine has ended it, so that an id which is used
    again cannot receive the old attempt's outputs. `is_ending` once the engine was told to end it."""

    __slots__ = ("attempt", "error", "is_ending", "next_offset", "outputs", "waiter")

    def __init__(self, attempt: int, next_offset: int) -> None:
        self.attempt = attempt
        self.next_offset = next_offset
        self.outputs: deque[TokenOutput] = deque()
        self.error: HeadraceError | None = None
        self.is_ending = False
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, error: HeadraceError) -> None:
        self.error = error
        self.wake()


class Streams:
    """Streams by request id. `send` puts a message on its way, `counters` counts under "late_outputs"."""

    def __init__(self, send: Callable[[wire.ClientMessage], None], counters: dict[str, int]) -> None:
        self._send = send
        self._counters = counters
        self._by_id: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def check(self, request: GenerateRequest) -> None:
        """Raises RequestError where the id is in use, PressureError where there are too many."""
        old = self._by_id.get(request.request_id)
        if old is not None and old.attempt >= request.attempt:
            raise RequestError(f"Request {request.request_id} is running already.", param="request_id")
        if len(self._by_id) >= MAX_STREAMS:
            raise PressureError(f"{MAX_STREAMS} requests are running already.")

    def begin(self, request: GenerateRequest) -> Stream:
        """Add the stream of a request that was checked. Where a later attempt takes the id the engine lets go of the
        earlier one first, and nobody waits for that one."""
        if (old := self._by_id.get(request.request_id)) is not None:
            self._send(wire.Abort(request.request_id))
            old.fail(RequestFailedError("A later attempt took the request's place."))
        stream = self._by_id[request.request_id] = Stream(request.attempt, len(request.resume_ids))
        return stream

    def end(self, request_id: str, message: wire.ClientMessage) -> None:
        """Tell the engine to end a request. Unknown ids are ignored."""
        if stream := self._by_id.get(request_id):
            stream.is_ending = True
            self._send(message)

    def abandon(self, request_id: str, stream: Stream) -> None:
        """The consumer left. The stream is forgotten when the engine's terminal output comes."""
        stream.outputs.clear()
        if self._by_id.get(request_id) is stream and not stream.is_ending:
            self._send(wire.Abort(request_id))

    def deliver(self, batch: list[TokenOutput]) -> None:
        streams = self._by_id
        for output in batch:
            stream = streams.get(output.request_id)
            if stream is None or output.attempt != stream.attempt or output.offset < stream.next_offset:
                self._counters["late_outputs"] += 1
                continue
            if output.offset > stream.next_offset:
                # Tokens are missing: better a new attempt from what has arrived than a stream with a hole.
                streams.pop(output.request_id)
                self._send(wire.Abort(output.request_id))
                stream.fail(EngineDiedError("Outputs of the engine were lost on their way."))
                continue
            stream.next_offset += len(output.token_ids)
            if output.finish_reason is not None:
                del streams[output.request_id]
            stream.outputs.append(output)
            stream.wake()

    def refuse(self, request_id: str, attempt: int, error: HeadraceError) -> None:
        """The engine has not taken this attempt."""
        stream = self._by_id.get(request_id)
        if stream is not None and stream.attempt == attempt:
            del self._by_id[request_id]
            stream.fail(error)

    def fail(self, error: HeadraceError) -> None:
        """End all of them."""
        streams, self._by_id = self._by_id, {}
        for stream in streams.values():
            stream.fail(error)
