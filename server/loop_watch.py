"""Whether the loop of an engine on this machine still moves.

An engine tells its load ten times a second, except within a step, and a long step is no fault: while its main thread
gets on, it computes. So a silent engine is stuck when that thread has not run either (a stopped process, a deadlock),
or when it has been silent for `COMPUTING_PATIENCE` times as long (a loop without an end). One that loads never is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol

from engine.wire.remote_state import RemoteState

LOOKS = 10
"""Looks in the shorter of the times. Looks are counted and not seconds: while this process was stopped, alone or with
the whole machine, it did not look."""

COMPUTING_PATIENCE = 20


class HeardEngine(Protocol):
    """The part of RemoteEngine that is needed here. It watches the load."""

    @property
    def frames_received(self) -> int: ...

    def state(self) -> RemoteState: ...


def main_thread_marks(pid: int) -> str | None:
    """Return what changes whenever a process's main thread runs; None where the system does not tell.

    On Linux: the nanoseconds that it ran and waited for a core, and how often.
    """
    try:
        with open(f"/proc/{pid}/task/{pid}/schedstat", encoding="ascii") as file:
            return file.read()
    except OSError:
        return None


class LoopWatch:
    """One engine; `look` at even intervals of `look_s`."""

    def __init__(
        self, engine: HeardEngine, look_s: float, read_marks: Callable[[int], str | None] = main_thread_marks
    ) -> None:
        self._engine = engine
        self._look_s = look_s
        self._read_marks = read_marks
        self._frames: int | None = None
        self._marks: str | None = None
        self._served_pid: int | None = None
        self._silent_looks = 0
        self._still_looks = 0

    def look(self, pid: int | None) -> None:
        """`pid` is of the engine's process, None while there is none. Until it has served once it loads."""
        if (info := self._engine.state().info) is not None:
            self._served_pid = info.pid
        frames, marks = self._engine.frames_received, None if pid is None else self._read_marks(pid)
        is_silent = pid is not None and pid == self._served_pid and frames == self._frames
        is_still = is_silent and marks is not None and marks == self._marks
        self._silent_looks = self._silent_looks + 1 if is_silent else 0
        self._still_looks = self._still_looks + 1 if is_still else 0
        self._frames, self._marks = frames, marks

    def is_stuck_for(self, time_s: float) -> bool:
        looks = time_s / self._look_s
        return self._still_looks >= looks or self._silent_looks >= looks * COMPUTING_PATIENCE


class LocalLoops:
    """The engines of this machine that another process has started. `run` until it is cancelled."""

    def __init__(self, engines: Callable[[], Collection[HeardEngine]], unready_after_s: float) -> None:
        self._engines = engines
        self._unready_after_s = unready_after_s
        self._watches: dict[HeardEngine, LoopWatch] = {}

    async def run(self) -> None:
        look_s = self._unready_after_s / LOOKS
        while True:
            await asyncio.sleep(look_s)
            engines = self._engines()
            self._watches = {engine: self._watches.get(engine) or LoopWatch(engine, look_s) for engine in engines}
            for engine, watch in self._watches.items():
                info = engine.state().info
                watch.look(None if info is None else info.pid)

    def is_stuck(self, engine: HeardEngine) -> bool:
        watch = self._watches.get(engine)
        return watch is not None and watch.is_stuck_for(self._unready_after_s)
