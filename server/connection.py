"""One HTTP connection: uvicorn's httptools protocol with the bounds that it leaves to a proxy in front of it.

Bounds the head of a request in bytes and in time, how long an answered request may go on sending, how long a client may
leave its answer unread, and the number of connections. Answers broken HTTP in the API's own shape. Knows no routes.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import uuid
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.errors import error_body
from server.joined_head import JoinedHead

logger = logging.getLogger("headrace.http")

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
"""From a request's first bytes to the end of its headers."""

LINGER_S = 5.0
"""How long a client may go on sending what nobody reads any more, so that it gets to read its answer."""

WRITE_STALL_S = 120.0
"""How long a client may read nothing of what is there for it."""

MAX_PIPELINED = 16
RESERVED_FDS = 128
"""Of the process's file descriptors, for all else than connections."""


def raise_fd_limit() -> None:
    """Take all the file descriptors that this process may have: shells often give out 1024 of them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    max_connections.cache_clear()


@lru_cache(maxsize=1)
def max_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1_000_000 if soft == resource.RLIM_INFINITY else max(soft - RESERVED_FDS, soft // 2)


class Connection(HttpToolsProtocol):
    """Refuses by closing: what comes behind a refused request cannot be told apart from it."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_alarm = _Alarm(self.loop)
        self._linger_alarm = _Alarm(self.loop)
        self._stall_alarm = _Alarm(self.loop)
        self._head_bytes = 0
        self._unframed_bytes = 0
        self._in_head = False
        self._in_body = False
        self._skipping_head = False
        self._refused = False
        self._running: RequestResponseCycle | None = None

    # --- the transport's calls ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            message = "The server has as many connections as it can hold."
            self._refuse(503, message, "service_unavailable_error", "too_many_connections")
            self.transport.close()
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for alarm in (self._head_alarm, self._linger_alarm, self._stall_alarm):
            alarm.clear()
        self._unset_keepalive_if_required()
        # The base class tells the last request only; one that others were pipelined behind has to know as well.
        self._end_running()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        went_on = self._in_head
        self._unframed_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _HeadTooLargeError):
                self._refuse_head()
            else:
                logger.debug("broken HTTP: %s", error)
                self.send_400_response("Invalid HTTP request received.")
            return
        if self._in_head:
            self._watch_head(len(data) if went_on else 0)
        elif self._in_body and self._unframed_bytes > MAX_HEAD_BYTES:
            self._refuse_head()  # an endless trailer or chunk extension

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_alarm.set(WRITE_STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stall_alarm.clear()
        super().resume_writing()

    # --- the parser's calls -------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if not self._skipping_head:
            super().on_message_begin()
            self._in_head = True
            self._head_bytes = self._unframed_bytes = 0

    def on_url(self, url: bytes) -> None:
        if not self._skipping_head:
            self._count_head(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._skipping_head:
            self._count_head(len(name) + len(value) + len(b": \r\n"))
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._skipping_head:
            return
        self._head_alarm.clear()
        self._in_head = False
        self._in_body = True
        super().on_headers_complete()
        if self.pipeline and len(self.pipeline) < MAX_PIPELINED:
            # Read on all the same: only a read tells that the client has gone.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._unframed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # what the parser takes for another protocol is the body
        super().on_message_complete()
        self._in_body = False
        self._linger_alarm.clear()
        if self.cycle.response_complete:
            self._await_request()

    # --- requests and answers -----------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        cycle.transport = JoinedHead(self.transport, self.loop)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._linger_alarm.set(LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg, "invalid_request_error", "invalid_http")

    def _await_request(self) -> None:
        """Close the connection when no request begins on it for the time that idle ones get."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])

    def _decline_upgrade(self, rest: bytes) -> None:
        """Go on in HTTP/1.1, as a server may that does not know the other protocol (Java's client asks for HTTP/2 with
        its first request). The parser has left at the end of the headers: a new one gets a head that frames the body
        alike, and then the rest."""
        framing = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] in _FRAMING)
        self.parser = httptools.HttpRequestParser(self)
        self._skipping_head = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
        self._skipping_head = False
        if rest:
            self._feed(rest)

    def _watch_head(self, new_bytes: int) -> None:
        """Bound a head that is under way. The parser keeps a long header to itself until it is whole."""
        self._head_bytes += new_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        elif not self._head_alarm.is_set:
            self._head_alarm.set(HEAD_TIMEOUT_S, self._refuse_slow_head)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLargeError

    def _refuse_head(self) -> None:
        message = f"The request's URL, headers or trailers are larger than {MAX_HEAD_BYTES} bytes."
        self._refuse(431, message, "invalid_request_error", "headers_too_large")

    def _refuse_slow_head(self) -> None:
        message = f"The request's headers did not arrive within {HEAD_TIMEOUT_S:g} s."
        self._refuse(408, message, "invalid_request_error", "request_timeout")

    def _refuse(self, status: int, message: str, kind: str, code: str) -> None:
        """Answer, unless another answer is under way or owed first, and close once the client has stopped sending."""
        self._refused = True
        self._head_alarm.clear()
        running = self._running
        owed = running is not None and not running.response_complete and self._in_head
        begun = running is not None and running.response_started and not running.response_complete
        self._end_running()
        if owed or begun:
            self.transport.close()
        if self.transport.is_closing():
            return
        body = error_body(message, kind, code=code)
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nx-request-id: req-%b\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(STATUS_LINE[status] + head % (len(body), uuid.uuid4().hex.encode()) + body)
        # Closing with bytes unread would reset the connection, and take the answer back.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger_alarm.set(LINGER_S, self.transport.close)

    def _end_running(self) -> None:
        """Tell the application that its client is gone."""
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()


_FRAMING = (b"content-length", b"transfer-encoding")


class _HeadTooLargeError(Exception):
    """Leaves the parser through its callbacks."""


class _Alarm:
    """At most one call in the future."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self, delay_s: float, call: Callable[[], None]) -> None:
        self.clear()
        self._timer = self._loop.call_later(delay_s, call)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
