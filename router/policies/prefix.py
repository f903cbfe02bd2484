"""The default policy: the predicted time until the first token, with a dearer price for tokens that are not cached.

    cost = (queued + weight * missing) / prefill rate     what is computed before this prompt, and for it
         + tokens to fetch / fetch rate, per tier         or computing them again where that is faster
         + decode_steps * decoding context / decode rate  what this request's own answer will be slowed down by
         + kv * k / (1 - k)                               k: projected KV usage

A missing token costs `weight` times its own time: computing it also delays all that comes behind it, and takes a place
in a cache that another prefix has to leave. The more requests wait in the pool, the more are delayed, and the weight
grows with them: near saturation a pool lives from its hits. There is no threshold: a target with a long queue loses the
requests whose hit is not worth the wait, and no others.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.values import Candidate, Hit, Query, Score, Tier

FULL = 0.99
"""KV usage is taken to be no more than this: a full target is dear, but can be compared."""


class PrefixWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The weights of the terms above. A missing token's is `miss + crowd * n`, at most `max_miss`, with n requests per
    target that have had no output yet."""

    miss: float = 2.5
    crowd: float = 0.5
    max_miss: float = 10.0
    decode_steps: float = 5.0
    kv: float = 0.15


class Prefix:
    """Hits are those that the candidates carry: the index's, learned from KV events."""

    name = "prefix"

    def __init__(self, weights: PrefixWeights | None = None) -> None:
        self._weights = weights or PrefixWeights()

    def score(self, query: Query, candidates: Sequence[Candidate]) -> list[Score]:
        return self.score_hits(query, candidates, [candidate.hit for candidate in candidates])

    def score_hits(self, query: Query, candidates: Sequence[Candidate], hits: Sequence[Hit]) -> list[Score]:
        """Score the candidates as if these were their hits."""
        waiting = sum(candidate.unanswered for candidate in candidates) / len(candidates)
        weight = min(self._weights.max_miss, self._weights.miss + self._weights.crowd * waiting)
        return [self._score(query, one, hit, weight) for one, hit in zip(candidates, hits, strict=True)]

    def _score(self, query: Query, candidate: Candidate, hit: Hit, weight: float) -> Score:
        weights, rate = self._weights, candidate.prefill_rate
        # The last token is computed also when all are cached: its logits are what the first token comes from.
        missing = max(1, query.prompt_tokens - hit.tokens)
        usage = min(FULL, candidate.kv_usage)
        queue_s = candidate.queued_uncached_tokens / rate
        miss_s = weight * missing / rate
        fetch_s = _fetch_s(candidate, hit, weight) if hit.tokens > hit.device else 0.0
        decode_s = weights.decode_steps * candidate.decode_tokens / candidate.decode_rate
        kv_s = weights.kv * usage / (1 - usage)
        return Score(
            target_id=candidate.target_id,
            cost=queue_s + miss_s + fetch_s + decode_s + kv_s,
            reasons={"queue_s": queue_s, "miss_s": miss_s, "fetch_s": fetch_s, "decode_s": decode_s, "kv_s": kv_s},
        )


def _fetch_s(candidate: Candidate, hit: Hit, weight: float) -> float:
    """Return the time to fetch what the slower tiers have, or the price of computing it where that is less."""
    total = 0.0
    tiers: tuple[tuple[Tier, int], ...] = (("ram", hit.ram), ("disk", hit.disk), ("remote", hit.remote))
    for tier, tokens in tiers:
        compute_s = weight * tokens / candidate.prefill_rate
        rate = candidate.fetch_rates.get(tier)
        total += compute_s if rate is None else min(tokens / rate, compute_s)
    return total
