"""Asks a server of this machine whether it is ready, over HTTP, as a client would."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

POLL_INTERVAL_S = 0.05
ANSWER_TIMEOUT_S = 5.0


async def wait_answering(url: str) -> None:
    """Return once GET /ready answers 200, however long that takes.

    An engine is ready a moment before its API processes are: they still have to fetch the tokenizer from it.
    """
    while True:
        if await _is_ready(url):
            return
        await asyncio.sleep(POLL_INTERVAL_S)


async def _is_ready(url: str) -> bool:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                writer.write(f"GET /ready HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
                status_line = await reader.readline()
            finally:
                writer.close()
    except OSError:  # TimeoutError is one
        return False
    return b" 200 " in status_line
