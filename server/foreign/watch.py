"""Looks at another server on a loop of its own: its health, and its load where it tells it.

A server that refuses connections or says that it is not well is lost at once. One that takes too long may only be busy:
it keeps its state, and whoever counts what it says (`heard`) decides when that has lasted too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from engine.protocol import EngineLoad
from server.foreign.load import LoadReader

if TYPE_CHECKING:
    import aiohttp

HEALTH_TIMEOUT_S = 2.0
LOAD_INTERVAL_S = 1.0
"""Reports count for two seconds (router/in_flight.py)."""

MAX_ANSWER_BYTES = 4 * 1024 * 1024

Health = Literal["unknown", "well", "draining", "lost"]


class Told(msgspec.Struct, frozen=True):
    """What a health answer may say, of ours: its state."""

    status: object = None


class ServerWatch:
    """The server at `url`. `on_change` is called whenever `health` has changed, `on_load` with each load that is told.

    `heard` counts answers. `lives` counts how often it was found well after it was lost, or at first.
    """

    def __init__(
        self,
        url: str,
        health_path: str,
        interval_s: float,
        on_change: Callable[[], None],
        on_load: Callable[[EngineLoad], None],
    ) -> None:
        self.health: Health = "unknown"
        self.heard = 0
        self.lives = 0
        self.load_reader: LoadReader | None = None
        """Set once it is known how the server tells its load."""
        self._url, self._health_path, self._interval_s = url, health_path, interval_s
        self._on_change, self._on_load = on_change, on_load
        self._look_now = asyncio.Event()

    def look_soon(self) -> None:
        """Something went wrong: look now instead of at the next turn."""
        self._look_now.set()

    def lose(self) -> None:
        """Take it for lost until it answers again."""
        self._become("lost")
        self.look_soon()

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        load_due_s = 0.0
        while True:
            self._look_now.clear()
            await self._look(session)
            if self.load_reader is not None and self.health in ("well", "draining") and loop.time() >= load_due_s:
                load_due_s = loop.time() + 0.9 * LOAD_INTERVAL_S
                await self._read_load(session, self.load_reader)
            interval_s = self._interval_s if self.load_reader is None else min(self._interval_s, LOAD_INTERVAL_S)
            try:
                async with asyncio.timeout(interval_s):
                    await self._look_now.wait()
            except TimeoutError:
                continue

    async def _look(self, session: aiohttp.ClientSession) -> None:
        import aiohttp

        try:
            status, body = await fetch(session, self._url + self._health_path)
        except TimeoutError:
            return
        except (aiohttp.ClientError, OSError):
            self._become("lost")
            return
        self.heard += 1
        if status != 200:
            self._become("lost")
        else:
            self._become("draining" if _says_draining(body) else "well")

    async def _read_load(self, session: aiohttp.ClientSession, reader: LoadReader) -> None:
        import aiohttp

        try:
            status, body = await fetch(session, self._url + reader.path)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return  # what is wrong with it, its health says; meanwhile the leases alone count
        load = reader.read(body) if status == 200 else None
        if load is not None:
            self._on_load(load)

    def _become(self, health: Health) -> None:
        if health == self.health:
            return
        if self.health in ("unknown", "lost") and health != "lost":
            self.lives += 1
        self.health = health
        self._on_change()


async def fetch(
    session: aiohttp.ClientSession, url: str, body: object = None, *, timeout_s: float = HEALTH_TIMEOUT_S
) -> tuple[int, bytes]:
    """Return status and body of an answer, cut where it is too large. Raises aiohttp.ClientError and TimeoutError."""
    import aiohttp

    data = None if body is None else msgspec.json.encode(body)
    async with session.request(
        "GET" if body is None else "POST",
        url,
        data=data,
        headers={} if body is None else {"Content-Type": "application/json"},
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        allow_redirects=False,
    ) as response:
        answer = bytearray()
        while len(answer) <= MAX_ANSWER_BYTES and (chunk := await response.content.readany()):
            answer += chunk
        return response.status, bytes(answer)


def _says_draining(body: bytes) -> bool:
    try:
        return msgspec.json.decode(body, type=Told).status == "draining"
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
