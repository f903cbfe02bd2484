"""Finds engines that are connected and do not answer: their process is stopped, or its loop is stuck.

ZeroMQ's own threads answer heartbeats, so the wire alone never notices a stuck loop. An engine tells its load ten times
a second, except within a step. Nothing is taken from one while no other could go on with it: then waiting is best.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Protocol

from engine.wire.remote_state import RemoteState

log = logging.getLogger("headrace.fleet")

LOOKS = 10
"""Looks in a row that find nothing new, in one time-out. Looks are counted and not seconds, so that a pause of this
process, in which it reads nothing, is not taken for one of the engine's."""

MAX_PATIENCE = 8
"""An engine that wakes by itself was slow, maybe within a step: it gets twice the time next, up to so many times it."""


class ReportingEngine(Protocol):
    """The part of RemoteEngine that is needed here. It watches the load."""

    @property
    def address(self) -> str: ...

    @property
    def frames_received(self) -> int: ...

    def state(self) -> RemoteState: ...

    def give_up(self, reason: str) -> None: ...


class _Silence:
    """How long one engine has said nothing, in looks; `patience` in time-outs."""

    def __init__(self) -> None:
        self.frames = 0
        self.looks = 0
        self.patience = 1
        self.incarnation: str | None = None

    def look(self, engine: ReportingEngine) -> None:
        frames, incarnation = engine.frames_received, engine.state().incarnation
        if incarnation not in (None, self.incarnation):
            self.incarnation, self.patience = incarnation, 1
        self.looks = self.looks + 1 if frames == self.frames and _is_due(engine) else 0
        self.frames = frames

    @property
    def is_heard(self) -> bool:
        return self.looks < LOOKS // 2

    @property
    def is_over(self) -> bool:
        return self.looks >= LOOKS * self.patience


class StallWatch:
    """`engines` are those of one model that are there now. `run` until it is cancelled."""

    def __init__(self, engines: Callable[[], Collection[ReportingEngine]], timeout_s: float) -> None:
        self._engines = engines
        self._timeout_s = timeout_s
        self._silences: dict[ReportingEngine, _Silence] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._timeout_s / LOOKS)
            self.look()

    def look(self) -> None:
        """Count the time of those that are silent, and give them up when it is over."""
        engines = self._engines()
        self._silences = {engine: self._silences.get(engine) or _Silence() for engine in engines}
        for engine, silence in self._silences.items():
            silence.look(engine)
        can_take_over = any(one.is_heard and engine.state().state == "ready" for engine, one in self._silences.items())
        for engine, silence in self._silences.items():
            if silence.is_over and can_take_over:
                silence_s = self._timeout_s * silence.patience
                log.warning(
                    "the engine at %s has not answered for %g s: others go on with its work", engine.address, silence_s
                )
                silence.looks, silence.patience = 0, min(2 * silence.patience, MAX_PATIENCE)
                engine.give_up(f"The engine has not answered for {silence_s:g} s.")


def _is_due(engine: ReportingEngine) -> bool:
    """Whether it would say something if it could. One that loads is silent for as long as it likes."""
    return engine.state().state in ("ready", "draining")
