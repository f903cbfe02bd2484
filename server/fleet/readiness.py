"""The state of several engines of one model, as the HTTP layer tells it: the best of theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from engine.protocol import EngineInfo
from server.health import STATUSES, ServiceState
from server.loop_watch import HeardEngine

READY = ServiceState("ready")


class ObservedEngine(HeardEngine, Protocol):
    """The part of an engine elsewhere that is needed here."""

    async def wait_ready(self) -> EngineInfo: ...


class EnginesReadiness:
    """`engines` returns those that are there now. Once one was ready, having none means restarting and no longer
    loading: requests may wait then. While not `is_open` the process is not ready, whatever its engines are; one that
    `is_stuck` cannot serve, whatever it has said."""

    def __init__(
        self,
        engines: Callable[[], Iterable[ObservedEngine]],
        is_open: Callable[[], bool] = lambda: True,
        is_stuck: Callable[[ObservedEngine], bool] = lambda _engine: False,
    ) -> None:
        self._engines = engines
        self._is_open = is_open
        self._is_stuck = is_stuck
        self._was_ready = False
        self._grown = asyncio.Event()

    def state(self) -> ServiceState:
        if not self._is_open():
            return ServiceState("loading", progress=1.0)
        states = []
        for engine in self._engines():
            state = self._state_of(engine)
            if state.status == "ready":  # nothing is better
                return state
            states.append(state)
        if not states:
            return ServiceState("restarting" if self._was_ready else "loading", progress=0.0)
        return min(states, key=_rank)

    async def wait_ready(self) -> None:
        """Return when one engine can be asked to describe itself."""
        while True:
            more = asyncio.ensure_future(self._grown.wait())
            ready = [asyncio.ensure_future(engine.wait_ready()) for engine in self._engines()]
            try:
                await asyncio.wait([more, *ready], return_when=asyncio.FIRST_COMPLETED)
                if any(wait.done() for wait in ready):
                    self._was_ready = True
                    return
            finally:
                for wait in (more, *ready):
                    wait.cancel()

    def note_new_engine(self) -> None:
        """There is one more that may be waited for."""
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def _state_of(self, engine: ObservedEngine) -> ServiceState:
        state = engine.state()
        match state.state:
            case "ready" | "draining" if self._is_stuck(engine):
                return ServiceState("restarting", progress=0.0)
            case "ready":
                self._was_ready = True
                return READY
            case "draining":
                return ServiceState("draining")
            case "failed":
                return ServiceState("failed", error=state.message or "the engine failed")
            case "loading" if not self._was_ready:
                return ServiceState("loading", progress=state.progress)
        return ServiceState("restarting", progress=state.progress)


def _rank(state: ServiceState) -> tuple[int, float]:
    """Smaller is better; of two that load, the one that is further."""
    return STATUSES.index(state.status), -(state.progress or 0.0)
