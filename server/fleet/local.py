"""The registry of a launcher and its children: a list that does not change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from engine.errors import UnsupportedError
from router.registry.base import Announcement, GatewayRecord, Record, WorkerRecord


class LocalRegistry:
    """Yields its list once; nobody can be added to it. There are no gateways in it."""

    def __init__(self, workers: Sequence[WorkerRecord]) -> None:
        self._workers = tuple(workers)

    async def watch(self) -> AsyncIterator[tuple[WorkerRecord, ...]]:
        yield self._workers
        await asyncio.Event().wait()

    async def watch_gateways(self) -> AsyncIterator[tuple[GatewayRecord, ...]]:
        yield ()
        await asyncio.Event().wait()

    async def announce(self, record: Record) -> Announcement:
        raise UnsupportedError("The list of a launcher's own processes takes no others.")

    async def close(self) -> None:
        """Nothing is open."""
