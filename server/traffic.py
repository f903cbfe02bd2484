"""The requests that run now, and how they end when the server drains. Knows no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from engine.errors import DrainingError

T = TypeVar("T")

CUT_OFF_GRACE_S = 2.0
"""How long cut-off requests get to send their error event."""


class Traffic:
    """Every request's work is a task in here from its first byte to its last, so none is missed by a drain."""

    def __init__(self) -> None:
        self.draining = False
        self._tasks: set[asyncio.Task[object]] = set()
        self._cut_off: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Run `work` as a task that a drain waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        self._idle.clear()
        task.add_done_callback(self._ended)
        return task

    def cut_off_current(self) -> bool:
        """Tell the current, cancelled task whether it was cancelled by the end of the drain and not by its client."""
        return asyncio.current_task() in self._cut_off

    async def drain(self, timeout_s: float) -> None:
        """Let what runs finish for `timeout_s`, then cancel the rest and wait until it has said so to its clients."""
        self.draining = True
        if await self._idle_within(timeout_s):
            return
        self._cut_off = set(self._tasks)
        for task in self._cut_off:
            task.cancel()
        await self._idle_within(CUT_OFF_GRACE_S)

    async def _idle_within(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._idle.set()


def draining_error() -> DrainingError:
    return DrainingError("The server is shutting down.", retry_after_s=1.0)
