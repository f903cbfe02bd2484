"""The card is printed when a client's request would be answered, and not before."""

from __future__ import annotations

import asyncio
import socket

from server.ready_probe import wait_answering


async def test_returns_with_the_first_answer_that_says_ready() -> None:
    answers = [b"", b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"garbage\r\n", b"HTTP/1.1 200 OK\r\n\r\n"]
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answers[len(asked) - 1])
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        await wait_answering(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert len(asked) == 4
    assert all(one.startswith(b"GET /ready HTTP/1.1\r\nHost: 127.0.0.1:") for one in asked)


async def test_waits_while_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        waiting = asyncio.create_task(wait_answering(f"http://127.0.0.1:{port}"))
        await asyncio.sleep(0)
    asked = 0

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", port):
        await waiting
    assert asked == 1
