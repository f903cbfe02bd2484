"""A registry in the test's hand: watchers see what it lists, now and after every change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from router.registry.base import Announcement, GatewayRecord, Record, WorkerRecord


class ListedRegistry:
    def __init__(self, *workers: WorkerRecord) -> None:
        self._workers = workers
        self._changed = asyncio.Event()

    def list(self, *workers: WorkerRecord) -> None:
        self._workers = workers
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def watch(self) -> AsyncIterator[tuple[WorkerRecord, ...]]:
        while True:
            changed = self._changed
            yield self._workers
            await changed.wait()

    async def watch_gateways(self) -> AsyncIterator[tuple[GatewayRecord, ...]]:
        yield ()
        await asyncio.Event().wait()

    async def announce(self, record: Record) -> Announcement:
        raise NotImplementedError

    async def close(self) -> None:
        self.list()
