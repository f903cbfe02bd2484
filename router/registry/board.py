"""The latest list of records, for any number of watchers. Knows no registry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

R = TypeVar("R")


class Board(Generic[R]):
    """`records` is None until the first `post`. A slow watcher skips lists that were replaced meanwhile."""

    def __init__(self) -> None:
        self.records: tuple[R, ...] | None = None
        self._changed = asyncio.Event()
        self._closed = False

    def post(self, records: tuple[R, ...]) -> None:
        if records != self.records:
            self.records = records
            self._wake()

    def close(self) -> None:
        """End all watches."""
        self._closed = True
        self._wake()

    async def watch(self) -> AsyncIterator[tuple[R, ...]]:
        seen: tuple[R, ...] | None = None
        while not self._closed:
            changed = self._changed
            if self.records is not None and self.records is not seen:
                seen = self.records
                yield seen
            else:
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
