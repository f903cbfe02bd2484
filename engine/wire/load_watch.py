"""What a client knows of its engine's load, and how many reports of it the engine may still send. Knows no sockets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from engine.protocol import EngineLoad
from engine.wire.messages import LoadReport

LOAD_CREDIT = 16
"""Reports that may be under way: a loop that stalls finds no more than these, and the newest behind them."""


class LoadWatch:
    """`latest` is None until a report has come. `submits` is how many of this connection's Submits it counts."""

    def __init__(self, on_load: Callable[[EngineLoad], None] | None) -> None:
        self.on_load = on_load
        self.forget()

    def forget(self) -> None:
        """The connection is another one."""
        self.latest: EngineLoad | None = None
        self.counters: dict[str, int] = {}
        self.submits = 0
        self._came_at_s = -math.inf
        self._owed = 0

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._came_at_s

    def take(self, report: LoadReport) -> None:
        self._owed += 1
        self.counters = report.counters
        self.latest, self.submits, self._came_at_s = report.load, report.submits, time.monotonic()
        if self.on_load is not None:
            self.on_load(report.load)

    def take_credit(self) -> int:
        """Return what is to be granted now: in few messages."""
        if self._owed < LOAD_CREDIT // 2:
            return 0
        owed, self._owed = self._owed, 0
        return owed
