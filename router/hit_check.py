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
UNTAKEN_ERRORS = 16_384
"""Of requests that nobody asked for. Older ones are forgotten."""


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
        self._errors_blocks: deque[int] = deque(maxlen=UNTAKEN_ERRORS)
        self._misses: dict[str, deque[bool]] = {}

    def observe(self, target_id: str, predicted: Hit, cached: CachedTokens, block_size: int) -> None:
        """Note the first output of a request: `cached` of its prompt was not computed, `predicted` was expected."""
        # What was only speculated on may be there or not: neither is an error.
        over = max(0, predicted.tokens - predicted.speculative - cached.total)
        under = max(0, cached.total - predicted.tokens)
        is_miss = over > TOLERANCE_BLOCKS * block_size
        counters = self.counters
        counters["requests"] += 1
        counters["misses"] += is_miss
        counters["predicted_tokens"] += predicted.tokens
        counters["cached_tokens"] += cached.total
        counters["overestimated_tokens"] += over
        counters["underestimated_tokens"] += under
        # A part of a block is none: the last token of a prompt is computed even where its block is there.
        self._errors_blocks.append(over // block_size - under // block_size)
        window = self._misses.setdefault(target_id, deque(maxlen=WINDOW_REQUESTS))
        window.append(is_miss)
        if is_miss and sum(window) >= MAX_MISSES:
            window.clear()
            counters["suspicions"] += 1
            self._on_suspicion(target_id)

    def take_errors(self) -> list[int]:
        """Return by how many blocks each prediction since the last call was wrong: above zero where less was found than
        was predicted."""
        errors = list(self._errors_blocks)
        self._errors_blocks.clear()
        return errors

    def forget(self, target_id: str) -> None:
        """The target is gone, or another process has taken its place."""
        self._misses.pop(target_id, None)
