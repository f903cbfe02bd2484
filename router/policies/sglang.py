"""The cache-aware rule of SGLang's router, as a baseline for the simulator: two gates instead of one price.

Requests under way out of balance (max - min > absolute, and max > relative * min) anywhere: the least busy target.
Otherwise the target with the longest cached prefix if that is more than a share of the prompt; else the least busy.
It is given the index's hits here, which are better than those of its own tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.values import Candidate, Query, Score


class Sglang:
    name = "sglang"

    def __init__(self, *, absolute: int = 64, relative: float = 1.5, cached_share: float = 0.3) -> None:
        self._absolute = absolute
        self._relative = relative
        self._cached_share = cached_share

    def score(self, query: Query, candidates: Sequence[Candidate]) -> list[Score]:
        counts = [one.in_flight for one in candidates]
        high, low = max(counts), min(counts)
        out_of_balance = high - low > self._absolute and high > self._relative * low
        longest = max(one.hit.tokens for one in candidates)
        by_hit = not out_of_balance and longest > self._cached_share * query.prompt_tokens
        return [
            Score(
                target_id=one.target_id,
                # Among the longest hits the least busy: counts stay below one token.
                cost=float(longest - one.hit.tokens) + one.in_flight / (1 + high) if by_hit else float(one.in_flight),
                reasons={"hit_tokens": float(one.hit.tokens), "in_flight": float(one.in_flight)},
            )
            for one in candidates
        ]
