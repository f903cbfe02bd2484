"""One connection from a client to an engine: a DEALER socket and its monitor on an asyncio loop. Knows no messages.

A session is never reused: when the connection is lost the client closes it and opens another, so nothing that was meant
for one engine process reaches the next. Until the two ends have shaken hands, ZeroMQ tries again and keeps what is
sent. Raises zmq.ZMQError for an address that cannot be, and when the process has no descriptors left.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import zmq

from engine.wire.messages import HEARTBEAT_INTERVAL_MS, HEARTBEAT_TIMEOUT_MS, MAX_ENGINE_FRAME_BYTES

Socket = zmq.Socket[Any]

HANDSHAKE_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

# As plain integers: pyzmq's enumerations cost several times as much as the calls that take them.
NOBLOCK, EVENTS, POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)

RECONNECT_INTERVAL_MS = 50
RECONNECT_INTERVAL_MAX_MS = 250
"""Bounds how long a client does not notice an engine that has come back, or that says why it does not."""


class Session:
    """`on_frame` gets every frame, `on_caught_up` runs when no more are there, `on_lost` once and in the end.
    `on_refused` runs when the two ends cannot shake hands; with True when ZeroMQ does not try again.

    zmq.asyncio costs more than the work it carries, so the sockets' descriptors are watched directly. Those are
    edge-triggered: a reader must go on until nothing is left, and any send may have swallowed an edge.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        on_frame: Callable[[bytes], None],
        on_caught_up: Callable[[], None],
        on_lost: Callable[[], None],
        on_refused: Callable[[bool], None],
        secure: Callable[[Socket], None] | None = None,
    ) -> None:
        self._on_frame, self._on_caught_up, self._on_lost = on_frame, on_caught_up, on_lost
        self._on_refused = on_refused
        self._loop = asyncio.get_running_loop()
        self._open = False
        self._reading = False
        self._has_met = False
        self._socket = context.socket(zmq.DEALER)
        try:
            self._start(address, secure)
        except BaseException:
            self._socket.disable_monitor()
            self._socket.close(0)
            raise

    def _start(self, address: str, secure: Callable[[Socket], None] | None) -> None:
        if secure is not None:
            secure(self._socket)
        self._socket.set(zmq.LINGER, 0)
        # What waits here is bounded by the client's streams: an abort must never fail for want of room.
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.MAXMSGSIZE, MAX_ENGINE_FRAME_BYTES)
        self._socket.set(zmq.RECONNECT_IVL, RECONNECT_INTERVAL_MS)
        self._socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_INTERVAL_MAX_MS)
        self._socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | HANDSHAKE_EVENTS)
        # A queue signals only to a reader that has found it empty: without this first look no event ever wakes us.
        self._monitor.get(zmq.EVENTS)
        try:
            self._socket.connect(address)
        except BaseException:
            self._monitor.close(0)
            raise
        self._open = True
        self._socket_fd = self._socket.fileno()
        self._monitor_fd = self._monitor.fileno()
        self._loop.add_reader(self._socket_fd, self._read)
        self._loop.add_reader(self._monitor_fd, self._read_monitor)

    def send(self, frame: bytes) -> None:
        self._socket.send(frame, NOBLOCK)
        if not self._reading and self._has_frames():
            self._reading = True
            self._loop.call_soon(self._read)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._socket_fd)
        self._loop.remove_reader(self._monitor_fd)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _read(self) -> None:
        self._reading = True
        try:
            self._drain()
        finally:
            self._reading = False

    def _drain(self) -> None:
        while self._open:
            try:
                frame = self._socket.recv(NOBLOCK)
            except zmq.Again:
                self._on_caught_up()
                if self._open and self._has_frames():
                    continue
                return
            self._on_frame(frame)

    def _has_frames(self) -> bool:
        return bool(int(self._socket.get(EVENTS)) & POLLIN)

    def _read_monitor(self) -> None:
        if not self._open:
            return
        while self._open:
            try:
                event = self._monitor.recv_multipart(zmq.NOBLOCK)[0]
            except zmq.Again:
                return
            self._handle_event(int.from_bytes(event[:2], sys.byteorder))

    def _handle_event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._has_met = True
        elif event != zmq.EVENT_DISCONNECTED:
            self._on_refused(event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        elif self._has_met:
            # What the engine said before it went is still to be read, a terminal output above all.
            self._read()
            if self._open:
                self._on_lost()
