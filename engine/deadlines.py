"""When requests have to end. Knows clocks and requests, not how one is ended."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from engine.request import Request


class Deadlines:
    """`clock` is monotonic, `wall_clock` is what deadlines are in; both in seconds. `num_live` tells how many requests
    have not ended."""

    def __init__(
        self, clock: Callable[[], float], wall_clock: Callable[[], float], num_live: Callable[[], int]
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._num_live = num_live
        self._heap: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        """How many are remembered, those of some ended requests among them."""
        return len(self._heap)

    def watch(self, deadline_unix_s: float, request: Request) -> None:
        # In the monotonic clock's time: from here on it does not matter when the wall clock is set.
        deadline_s = self._clock() + deadline_unix_s - self._wall_clock()
        heapq.heappush(self._heap, (deadline_s, request.order[1], request))
        # Requests that ended in time stay in the heap until their deadline; clear them out before they outnumber the
        # live ones, which costs O(1) per request on average.
        if len(self._heap) > 2 * self._num_live() + 64:
            self._heap = [entry for entry in self._heap if not entry[2].finished]
            heapq.heapify(self._heap)

    def expired(self) -> Iterator[Request]:
        """Yield the requests whose deadline has passed before they ended."""
        if not self._heap:
            return
        now_s = self._clock()
        while self._heap and self._heap[0][0] <= now_s:
            request = heapq.heappop(self._heap)[2]
            if not request.finished:
                yield request
