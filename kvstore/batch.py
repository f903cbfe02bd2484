"""Outcomes of work that was handed to a tier, collected as they come: a Report that can be waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvstore.tier import Deadline, Outcome


class Batch:
    """`report` goes to the tier with `size` pieces of work. `on_settled` is called once, by whoever reports the last
    piece, and for an empty batch at once."""

    def __init__(self, size: int, on_settled: Callable[[Batch], None] | None = None) -> None:
        self.outcomes: list[Outcome | None] = [None] * size
        """None for a piece that has not been reported: its memory is still the tier's."""
        self._open = size
        self._on_settled = on_settled
        self._condition = threading.Condition()
        if not size and on_settled is not None:
            on_settled(self)

    @property
    def settled(self) -> bool:
        return not self._open

    @property
    def leading(self) -> int:
        """How many pieces from the first on are "ok": the part of a prefix that can be used."""
        count = 0
        for outcome in self.outcomes:
            if outcome is None or outcome.status != "ok":
                break
            count += 1
        return count

    def report(self, index: int, outcome: Outcome) -> None:
        with self._condition:
            assert self.outcomes[index] is None, f"piece {index} was reported twice"
            self.outcomes[index] = outcome
            self._open -= 1
            settled = not self._open
            if settled:
                self._condition.notify_all()
        if settled and self._on_settled is not None:
            self._on_settled(self)

    def wait(self, deadline: Deadline) -> bool:
        """Wait until all is reported; return whether it was in time."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._open, deadline.left_s)
