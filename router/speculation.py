"""Blocks that a target is expected to have for a while, because a request was just sent there: when that ends.

Knows fingerprints and times, not where the expectation is written down.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, repeat

MAX_EXPECTED = 1_000_000
"""Fingerprints at a time, over all targets. Beyond it the ones that would end first end now."""


@dataclass(order=True, slots=True)
class Expectation:
    """One request's blocks at one target."""

    end_s: float
    number: int
    bit: int = field(compare=False)
    prints: list[int] = field(compare=False)


class Speculation:
    """What was expected again later ends with the later expectation alone."""

    def __init__(self, max_expected: int = MAX_EXPECTED) -> None:
        self._max_expected = max_expected
        self._numbers = count()
        self._heap: list[Expectation] = []
        self._latest: dict[int, dict[int, Expectation]] = {}
        self._expected = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, bit: int, prints: list[int], end_s: float) -> None:
        expectation = Expectation(end_s, next(self._numbers), bit, prints)
        heapq.heappush(self._heap, expectation)
        latest = self._latest.setdefault(bit, {})
        later = [one for one in prints if one in latest and latest[one].end_s > end_s] if latest else []
        kept = [latest[one] for one in later]
        latest.update(zip(prints, repeat(expectation), strict=False))
        latest.update(zip(later, kept, strict=True))
        self._expected += len(prints)

    def knows(self, bit: int) -> bool:
        """Whether anything was ever expected of this bit's target."""
        return bit in self._latest

    def forget(self, bit: int) -> None:
        """Nothing is expected of this bit's target any more."""
        self._latest.pop(bit, None)

    def pop_ended(self, now_s: float) -> Iterator[tuple[int, list[int]]]:
        """Yield bits with the fingerprints that are expected there no longer."""
        while self._heap and (self._heap[0].end_s <= now_s or self._expected > self._max_expected):
            ended = heapq.heappop(self._heap)
            self._expected -= len(ended.prints)
            latest = self._latest.get(ended.bit)
            if latest is None:
                continue
            prints = [one for one in ended.prints if latest.get(one) is ended]
            for one in prints:
                del latest[one]
            yield ended.bit, prints
