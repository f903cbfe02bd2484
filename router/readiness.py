"""Waiting for a target that can serve: for how long, and when not to wait at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from engine.errors import DeadlineError, HeadraceError, LoadingError, PressureError
from engine.protocol import Engine, EngineInfo, GenerateRequest

PATIENCE_S = 120.0
"""How long a request without a deadline waits for an engine to come back."""


class WatchedEngine(Engine, Protocol):
    """An engine of which it is known whether it can serve."""

    @property
    def is_ready(self) -> bool: ...

    async def wait_ready(self) -> EngineInfo:
        """Return when it can serve; never raise."""
        ...


class WatchedTarget(Protocol):
    """A `Target` whose engine is watched. Its owner opens and closes the engine."""

    @property
    def target_id(self) -> str: ...

    @property
    def engine(self) -> WatchedEngine: ...

    def takes(self, request: GenerateRequest) -> bool:
        """Whether its engine can do what the request asks for."""
        ...


async def refuse_while_loading(targets: Sequence[WatchedTarget]) -> None:
    """Raise LoadingError when an engine says that it is loading: that may take minutes, and the client had better know.

    For pools of which no target has ever been ready.
    """
    for target in targets:
        try:
            await target.engine.describe()
        except LoadingError:
            raise
        except HeadraceError:
            # Lost before it was ever ready: wait for it as for any lost one.
            continue


async def wait_for_any(
    events: Sequence[Coroutine[Any, Any, object]], deadline_unix_s: float | None, patience_s: float
) -> None:
    """Return when one of `events` has come; the others are cancelled.

    Raises DeadlineError when the deadline passes first, PressureError after `patience_s` where there is none.
    """
    left_s = patience_s
    if deadline_unix_s is not None:
        left_s = max(0.0, deadline_unix_s - time.time())
    waits = [asyncio.ensure_future(event) for event in events]
    try:
        done, _ = await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    if done:
        return
    if deadline_unix_s is not None:
        raise DeadlineError("The request's deadline passed while no engine was ready.")
    raise PressureError(f"No engine became ready within {patience_s:g} s.", retry_after_s=5.0)
