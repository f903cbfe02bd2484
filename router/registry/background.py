"""Work that goes on until it is closed, whatever fails meanwhile."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

log = logging.getLogger("headrace.registry")

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0


class Backoff:
    """Pauses that double from `FIRST_PAUSE_S` to `MAX_PAUSE_S`, each shortened at random by up to a half, so that a
    registry that comes back is not met by all of its clients at once."""

    def __init__(self) -> None:
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def next_pause_s(self) -> float:
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return pause_s * random.uniform(0.5, 1.0)


class Background:
    """One task that calls `work` again and again. `work` calls `healthy` when it got through to the other side.

    An error of `outages` is an outage: it is logged when it begins, and so is its end. Any other error is a fault of
    ours and is logged with its trace; both are followed by another call after a pause.
    """

    def __init__(self, what: str, outages: tuple[type[Exception], ...], work: Callable[[], Awaitable[None]]) -> None:
        self._what = what
        self._outages = outages
        self._work = work
        self._backoff = Backoff()
        self._is_out = False
        self._task = asyncio.create_task(self._run())

    def healthy(self) -> None:
        self._backoff.reset()
        if self._is_out:
            self._is_out = False
            log.info("%s: reached again", self._what)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _run(self) -> None:
        while True:
            try:
                await self._work()
                continue
            except self._outages as error:
                if not self._is_out:
                    self._is_out = True
                    log.warning("%s: not reached (%s: %s); trying again", self._what, type(error).__name__, error)
            except Exception:
                log.exception("%s failed", self._what)
            await asyncio.sleep(self._backoff.next_pause_s())
