"""One target's breaker: after repeated faults it is passed over for a while, then tried with one request.

Only faults count. A target that is full, or a client that is wrong or gone, says nothing about the target's health.
Time comes from the caller; nothing here waits.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import msgspec

from engine.protocol import Outcome

BreakerState = Literal["closed", "open", "half_open"]


class BreakerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`faults` within `window_s` open it for `open_s`, which doubles up to `max_open_s` each time a probe fails."""

    faults: int = 3
    window_s: float = 10.0
    open_s: float = 5.0
    max_open_s: float = 60.0


class Breaker:
    """`trips` counts how often it opened."""

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self.trips = 0
        self._limits = limits or BreakerLimits()
        self._faults: deque[float] = deque(maxlen=self._limits.faults)
        self._open_until: float | None = None
        self._open_s = self._limits.open_s
        self._is_probing = False

    def state(self, now_s: float) -> BreakerState:
        if self._open_until is None:
            return "closed"
        return "open" if now_s < self._open_until else "half_open"

    def allows(self, now_s: float) -> bool:
        """Whether a request may be sent: when half open, one at a time."""
        return self._open_until is None or (now_s >= self._open_until and not self._is_probing)

    def begin(self, now_s: float) -> bool:
        """Note that a request is sent. Returns whether it is a probe, which `end` must be told."""
        if self.state(now_s) != "half_open" or self._is_probing:
            return False
        self._is_probing = True
        return True

    def probe_answered(self) -> None:
        """The probe has got its first output. It is a probe no longer: its end may be far away."""
        self._is_probing = False
        self._close()

    def end(self, outcome: Outcome, now_s: float, *, is_probe: bool) -> bool:
        """Note how a request ended; return whether that opened it. Requests that were under way when it opened prove
        nothing more by failing."""
        trips = self.trips
        if is_probe:
            self._is_probing = False
        if outcome == "fault":
            self._note_fault(now_s, is_probe)
        elif outcome == "ok" and is_probe:
            self._close()
        return self.trips > trips

    def _note_fault(self, now_s: float, is_probe: bool) -> None:
        if self._open_until is not None:
            if is_probe:
                self._open_s = min(2 * self._open_s, self._limits.max_open_s)
                self._open(now_s)
            return
        self._faults.append(now_s)
        if len(self._faults) == self._limits.faults and now_s - self._faults[0] <= self._limits.window_s:
            self._open(now_s)

    def _open(self, now_s: float) -> None:
        self.trips += 1
        self._open_until = now_s + self._open_s
        self._faults.clear()

    def _close(self) -> None:
        self._open_until = None
        self._open_s = self._limits.open_s
        self._faults.clear()
