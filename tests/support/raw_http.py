"""HTTP over bare connections: cheap enough for storms and polls, and they can be cut in any way."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit


async def send(
    url: str, path: str, body: object = None, *, missing_bytes: int = 0
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request over a connection of its own, which the caller closes in the way that it wants to. Without a body
    it is a GET. With `missing_bytes` more of the body is announced than is sent."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    data = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    length = len(data) + missing_bytes
    head = f"{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    writer.write(head.encode() + data)
    return reader, writer


async def exchange(url: str, path: str, body: object = None) -> tuple[int, str]:
    """Send a request and return the status and the text of the whole answer."""
    reader, writer = await send(url, path, body)
    try:
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    assert head, "the connection was closed without an answer"
    if b"transfer-encoding: chunked" in head.lower():
        rest = _joined_chunks(rest)
    return int(head.split(b" ", 2)[1]), rest.decode()


def _joined_chunks(data: bytes) -> bytes:
    parts, position = [], 0
    while True:
        line_end = data.index(b"\r\n", position)
        size = int(data[position:line_end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(data[line_end + 2 : line_end + 2 + size])
        position = line_end + 2 + size + 2
