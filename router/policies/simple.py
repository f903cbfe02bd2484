"""Policies that look at no prompt: in turn, at random, and by what is under way."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from router.values import Candidate, Query, Score


class RoundRobin:
    """Targets in the order of their names, each in turn; one that is missing is passed over."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last = ""

    def score(self, query: Query, candidates: Sequence[Candidate]) -> list[Score]:
        order = sorted(candidate.target_id for candidate in candidates)
        start = next((index for index, name in enumerate(order) if name > self._last), 0)
        self._last = order[start]
        turns = {name: float((index - start) % len(order)) for index, name in enumerate(order)}
        return [Score(target_id=one.target_id, cost=turns[one.target_id]) for one in candidates]


class Random:
    """Any target."""

    name = "random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def score(self, query: Query, candidates: Sequence[Candidate]) -> list[Score]:
        chosen = self._rng.randrange(len(candidates))
        return [Score(target_id=one.target_id, cost=float(index != chosen)) for index, one in enumerate(candidates)]


class PowerOfTwo:
    """Of two random targets the one with fewer requests under way. The others cost infinitely much."""

    name = "power_of_two"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def score(self, query: Query, candidates: Sequence[Candidate]) -> list[Score]:
        drawn = set(self._rng.sample(range(len(candidates)), min(2, len(candidates))))
        return [
            _in_flight_score(one) if index in drawn else Score(target_id=one.target_id, cost=math.inf)
            for index, one in enumerate(candidates)
        ]


class LeastRequests:
    """The target with the fewest requests under way."""

    name = "least_requests"

    def score(self, query: Query, candidates: Sequence[Candidate]) -> list[Score]:
        return [_in_flight_score(one) for one in candidates]


class LeastTokens:
    """The target with the fewest prompt tokens still to be computed, then with the fewest tokens under way."""

    name = "least_tokens"

    def score(self, query: Query, candidates: Sequence[Candidate]) -> list[Score]:
        most = 1 + max(one.in_flight_tokens for one in candidates)
        return [
            Score(
                target_id=one.target_id,
                # The second is a fraction of one token: it decides between equals only.
                cost=one.queued_uncached_tokens + one.in_flight_tokens / most,
                reasons={"queued_tokens": one.queued_uncached_tokens, "in_flight_tokens": float(one.in_flight_tokens)},
            )
            for one in candidates
        ]


class LeastKV:
    """For pools that only decode: the target with the most free KV blocks, then with the fewest requests."""

    name = "least_kv"

    def score(self, query: Query, candidates: Sequence[Candidate]) -> list[Score]:
        most = 1 + max(one.in_flight for one in candidates)
        return [
            Score(
                target_id=one.target_id,
                cost=round(one.kv_usage, 2) + 0.01 * one.in_flight / most,
                reasons={"kv_usage": one.kv_usage, "in_flight": float(one.in_flight)},
            )
            for one in candidates
        ]


def _in_flight_score(candidate: Candidate) -> Score:
    in_flight = float(candidate.in_flight)
    return Score(target_id=candidate.target_id, cost=in_flight, reasons={"in_flight": in_flight})
