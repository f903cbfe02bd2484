"""The default policy's cost for engines that publish no KV events: hits are guessed from where prompts were sent.

What was sent to a target is taken to be cached there for a time. Bounded in blocks; the least recently used are
forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from router.policies.prefix import Prefix, PrefixWeights
from router.values import NO_HIT, Candidate, Hit, Query, Score


class PrefixApprox:
    """`clock` gives seconds. A guess lives for `ttl_s`; `max_blocks` bounds how many block keys are remembered."""

    name = "prefix_approx"

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        weights: PrefixWeights | None = None,
        ttl_s: float = 120.0,
        max_blocks: int = 500_000,
    ) -> None:
        self._cost = Prefix(weights)
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._sent: OrderedDict[bytes, dict[str, float]] = OrderedDict()

    def score(self, query: Query, candidates: Sequence[Candidate]) -> list[Score]:
        blocks = self._matched_blocks(query.keys)
        hits = [self._hit(query, blocks.get(one.target_id, 0)) for one in candidates]
        return self._cost.score_hits(query, candidates, hits)

    def dispatched(self, query: Query, target_id: str) -> None:
        until_s = self._clock() + self._ttl_s
        # Backwards, so that the ends of prefixes are forgotten before their beginnings.
        for key in reversed(query.keys):
            self._sent.setdefault(key, {})[target_id] = until_s
            self._sent.move_to_end(key)
        while len(self._sent) > self._max_blocks:
            self._sent.popitem(last=False)

    def forget(self, target_id: str) -> None:
        for key in [key for key, targets in self._sent.items() if target_id in targets]:
            targets = self._sent[key]
            del targets[target_id]
            if not targets:
                del self._sent[key]

    def _matched_blocks(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Return how many leading blocks each target is taken to have."""
        now_s = self._clock()
        matched: dict[str, int] = {}
        alive: set[str] | None = None
        for count, key in enumerate(keys, start=1):
            targets = self._sent.get(key)
            if targets is None:
                break
            holders = {target_id for target_id, until_s in targets.items() if until_s > now_s}
            alive = holders if alive is None else alive & holders
            if not alive:
                break
            matched.update(dict.fromkeys(alive, count))
        return matched

    @staticmethod
    def _hit(query: Query, blocks: int) -> Hit:
        return Hit(device=blocks * query.block_size, speculative=blocks * query.block_size) if blocks else NO_HIT
