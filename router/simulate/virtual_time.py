"""A clock that jumps from event to event. Events of the same time happen in the order in which they were planned."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualTime:
    """`now` is in seconds from the beginning."""

    def __init__(self) -> None:
        self.now = 0.0
        self._count = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def clock(self) -> float:
        return self.now

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, event))

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        self.at(self.now + delay_s, event)

    def run(self) -> None:
        """Let everything happen until nothing is planned."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
