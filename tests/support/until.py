"""Wait for a condition that another process or thread brings about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

LIMIT_S = 30.0


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, *, limit_s: float = LIMIT_S) -> None:
    """Return when it holds; fail with `what` after a time that only a hang reaches."""
    end = time.monotonic() + limit_s
    while True:
        holds = condition()
        if holds if isinstance(holds, bool) else await holds:
            return
        if time.monotonic() > end:
            raise AssertionError(f"not within {limit_s:g} s: {what}")
        await asyncio.sleep(0.005)
