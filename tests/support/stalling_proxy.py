"""A TCP proxy that can stop forwarding, in the middle of a frame too, while all connections stay open: a dead link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

READ_BYTES = 65_536


class StallingProxy:
    """`address` leads to `upstream` (tcp://HOST:PORT)."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.removeprefix("tcp://").rpartition(":")
        self._upstream = (host, int(port))
        self._flows = asyncio.Event()
        self._flows.set()
        self._bytes_left: int | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def is_stalled(self) -> bool:
        return not self._flows.is_set()

    def stall_after(self, count: int) -> None:
        """Forward so many more bytes of what upstream says, then nothing in any direction."""
        self._bytes_left = count

    def go_on(self) -> None:
        self._bytes_left = None
        self._flows.set()

    def cut(self) -> None:
        """Close all connections, wherever they are."""
        for writer in self._writers:
            writer.transport.abort()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, upstream_writer}
        self._start(self._pump(reader, upstream_writer, is_answer=False))
        self._start(self._pump(upstream_reader, writer, is_answer=True))

    def _start(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        try:
            while data := await reader.read(READ_BYTES):
                await self._flows.wait()
                if is_answer and self._bytes_left is not None:
                    now, data = data[: self._bytes_left], data[self._bytes_left :]
                    self._bytes_left -= len(now)
                    writer.write(now)
                    if data:
                        self._flows.clear()
                        await self._flows.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            return  # one end has gone
        finally:
            writer.close()
            self._writers.discard(writer)


@asynccontextmanager
async def stalling_proxy(upstream: str) -> AsyncIterator[StallingProxy]:
    proxy = StallingProxy(upstream)
    await proxy.open()
    try:
        yield proxy
    finally:
        await proxy.close()
