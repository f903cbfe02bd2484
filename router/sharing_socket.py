"""The sockets between processes that share their leases: how they are read, and how they are secured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import zmq

Socket = zmq.Socket[Any]


class SocketKeys(Protocol):
    """CURVE for both ends. Both calls come before the socket is bound or connected."""

    def secure_server(self, socket: Socket) -> None: ...

    def secure_client(self, socket: Socket, server_key: str) -> None:
        """`server_key` is the peer's public key (Z85)."""
        ...


class SocketReader:
    """Calls `on_frames` for every message of a socket on the running loop. Its descriptor is edge-triggered: a reader
    goes on until nothing is left, and after a send it looks again."""

    def __init__(self, socket: Socket, on_frames: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = socket.fileno()
        self._loop.add_reader(self._fd, self.read)
        self._reading = False
        self._open = True
        self._loop.call_soon(self.read)

    def read(self) -> None:
        if self._reading:
            return
        self._reading = True
        try:
            while self._open:
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return
                self._on_frames(frames)
        finally:
            self._reading = False

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            self._socket.close(0)
