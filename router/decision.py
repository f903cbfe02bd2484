"""What a dispatcher decided and why, and the last decisions for those who ask.

A decision keeps the candidates as the policy saw them. Of many only the cheapest are kept, so that the log is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from weakref import WeakValueDictionary

import msgspec

from router.values import Candidate, Score

KEPT_CANDIDATES = 16


REMEMBERED_DECISIONS = 512


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One target that could have been chosen."""

    candidate: Candidate
    score: Score


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request went where it went. `options` are the cheapest of `num_candidates`, the chosen one among them.

    `passed_over` tells for each other target why it was no candidate. `fail_open` is when all breakers were open and
    were therefore ignored. `at_s` is in the dispatcher's clock, `block_size` in tokens.
    """

    request_id: str
    policy: str
    target_id: str
    at_s: float
    prompt_tokens: int
    predicted_tokens: int
    num_candidates: int
    options: tuple[Option, ...]
    block_size: int = 64
    passed_over: dict[str, str] = {}
    fail_open: bool = False


class Trail(list[Decision]):
    """The decisions about one request from some moment on, the oldest first."""


class DecisionLog:
    """The last `capacity` decisions, by request: one that was tried several times has several."""

    def __init__(self, capacity: int = REMEMBERED_DECISIONS) -> None:
        self._capacity = capacity
        self._decisions: OrderedDict[int, Decision] = OrderedDict()
        self._by_request: dict[str, list[int]] = {}
        self._trails: WeakValueDictionary[str, Trail] = WeakValueDictionary()
        self._count = 0

    def __len__(self) -> int:
        return len(self._decisions)

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._decisions.values())

    def follow(self, request_id: str) -> Trail:
        """Return what will be decided about a request. It grows for as long as somebody holds it, however many others
        are decided meanwhile."""
        return self._trails.setdefault(request_id, Trail())

    def add(self, decision: Decision) -> None:
        if (trail := self._trails.get(decision.request_id)) is not None:
            trail.append(decision)
        self._decisions[self._count] = decision
        self._by_request.setdefault(decision.request_id, []).append(self._count)
        self._count += 1
        if len(self._decisions) > self._capacity:
            number, oldest = self._decisions.popitem(last=False)
            numbers = self._by_request[oldest.request_id]
            numbers.remove(number)
            if not numbers:
                del self._by_request[oldest.request_id]

    def find(self, request_id: str) -> list[Decision]:
        """Return the decisions of one request, oldest first; also those of its choices, which are named `<id>-<n>`."""
        prefix = f"{request_id}-"
        return [
            self._decisions[number]
            for name, numbers in self._by_request.items()
            if name == request_id or name.startswith(prefix)
            for number in numbers
        ]


def options_of(candidates: Sequence[Candidate], scores: Sequence[Score], chosen: int) -> tuple[Option, ...]:
    """Pair the cheapest candidates with their scores, the chosen one first."""
    rest = (index for index in range(len(scores)) if index != chosen)
    kept = sorted(rest, key=lambda index: scores[index].cost)[: KEPT_CANDIDATES - 1]
    return tuple(Option(candidate=candidates[index], score=scores[index]) for index in (chosen, *kept))
