"""Sends the head of an answer together with what comes behind it: one call of the system and one packet, where the
server underneath would make two, and a client that wakes once for its first token. Knows no HTTP but how a head begins.
"""

from __future__ import annotations

import asyncio

BEGINNING = b"HTTP/"


class JoinedHead(asyncio.Transport):
    """What one answer is written to, in front of the connection's transport. A head waits for the next write, and no
    longer than to the next turn of the loop."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._head: bytes | bytearray | memoryview = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        elif data[: len(BEGINNING)] == BEGINNING:
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)
