"""When to leave a failing place alone: it costs one deadline for each time it is tried, not one for each request."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable

from kvstore.tier import BreakerState

CONSECUTIVE = 3
WINDOW = 20
SHARE = 0.5
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0


class Breaker:
    """Opens after 3 failures in a row, or when half of the last 20 pieces failed. After a pause, which doubles up to
    30 s while the place keeps failing, one piece probes: it closes the breaker or begins the next pause.

    Failures are those of the place: misses, refusals and corrupt objects are none.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._clock, self._rng, self._first_pause_s = clock, rng or random.Random(), first_pause_s
        self._lock = threading.Lock()
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._in_a_row = 0
        self._pauses = 0
        self._probe_at: float | None = None
        self._probing = False
        self.trips = 0
        """How often it has opened, longer pauses of an open one aside."""

    @property
    def state(self) -> BreakerState:
        if self._probe_at is None:
            return "closed"
        return "probing" if self._probing else "open"

    @property
    def shut(self) -> bool:
        """Whether `admit` would say no: what would be refused later need not be queued."""
        return self._probe_at is not None and (self._probing or self._clock() < self._probe_at)

    def admit(self) -> bool:
        """Return whether to try. After True, exactly one of `succeeded`, `failed` and `unknown` follows."""
        with self._lock:
            if self.shut:
                return False
            self._probing = self._probe_at is not None
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._in_a_row = 0
            self._recent.append(True)
            if self._probing:
                self._probing, self._probe_at, self._pauses = False, None, 0
                self._recent.clear()

    def failed(self) -> None:
        with self._lock:
            self._in_a_row += 1
            self._recent.append(False)
            many = len(self._recent) == WINDOW and self._recent.count(False) >= SHARE * WINDOW
            if self._probing or (self._probe_at is None and (many or self._in_a_row >= CONSECUTIVE)):
                self._pause()

    def unknown(self) -> None:
        """The piece ended without telling anything about the place."""
        with self._lock:
            self._probing = False

    def _pause(self) -> None:
        self.trips += self._probe_at is None
        longest = min(self._first_pause_s * 2**self._pauses, MAX_PAUSE_S)
        self._pauses = min(self._pauses + 1, 16)
        self._probing = False
        # Jittered, so that many workers do not come back in step.
        self._probe_at = self._clock() + longest * self._rng.uniform(0.5, 1.0)
