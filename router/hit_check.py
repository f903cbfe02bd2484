"""The closed loop: what was predicted of a target's cache against what its answers say.

Blocks are evicted between a decision and its prefill, so single misses are normal; a run of them is not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from engine.protocol import CachedTokens
from router.values import Hit

WINDOW_REQUESTS = 100
MAX_MISSES = 5
TOLERANCE_BLOCKS = 2


class HitCheck:
    """`on_suspicion` gets the id of a target that missed `MAX_MISSES` of its last `WINDOW_REQUESTS` requests by more
    than `TOLERANCE_BLOCKS`; then its count begins anew. What was only speculated on is no miss.

    `counters`, cumulative: requests, misses, suspicions; predicted and cached tokens; tokens of each kind of error.
    """

    def __init__(self, on_suspicion: Callable[[str], None]) -> None:
        self.counters = {
            "requests": 0,
            "misses": 0,
            "suspicions": 0,
            "predicted_tokens": 0,
            "cached_tokens": 0,
            "overestimated_tokens": 0,
            "underestimated_tokens": 0,
        }
        self._on_suspicion = on_suspicion
        self._misses: dict[str, deque[bool]] = {}

    def observe(self, target_id: str, predicted: Hit, cached: CachedTokens, block_size: int) -> None:
        """Note the first output of a request: `cached` of its prompt was not computed, `predicted` was expected."""
        error = predicted.tokens - predicted.speculative - cached.total
        is_miss = error > TOLERANCE_BLOCKS * block_size
        counters = self.counters
        counters["requests"] += 1
        counters["misses"] += is_miss
        counters["predicted_tokens"] += predicted.tokens
        counters["cached_tokens"] += cached.total
        counters["overestimated_tokens"] += max(0, error)
        counters["underestimated_tokens"] += max(0, cached.total - predicted.tokens)
        window = self._misses.setdefault(target_id, deque(maxlen=WINDOW_REQUESTS))
        window.append(is_miss)
        if is_miss and sum(window) >= MAX_MISSES:
            window.clear()
            counters["suspicions"] += 1
            self._on_suspicion(target_id)

    def forget(self, target_id: str) -> None:
        """The target is gone, or another process has taken its place."""
        self._misses.pop(target_id, None)
