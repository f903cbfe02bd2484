"""How fast one target is, measured from its load reports: prefill and decode, in tokens/s, and loads from KV tiers.

Reports carry cumulative counters; what counts is their differences. Knows no clock: old measurements fade by the busy
time that was measured since.
"""

from __future__ import annotations

from engine.protocol import EngineLoad
from router.values import Tier

PRIOR_RATE = 2000.0
"""Prompt tokens/s of a target while nothing has been measured in its pool. All its targets are alike then, so that the
value decides only how a prompt weighs against what is not counted in prompt tokens."""

FETCH_SPEEDUP: dict[Tier, float] = {"ram": 20.0, "disk": 5.0, "remote": 4.0}
"""How much faster than computing a tier's blocks are assumed to arrive until it has been measured."""


MIN_SECONDS = 1e-6
"""No step is faster. What is measured stays finite, whatever an engine reports."""


class Meter:
    """A `rate` from pairs (amount, seconds), None until there is one.

    Pairs are weighted by their amount: rate = sum(a * a) / sum(a * s). A step with few tokens takes hardly less time
    than one with many, and a plain quotient would call a target slow because it was asked for little. `half_life_s` of
    measured time halves the weight of what was measured before.
    """

    def __init__(self, half_life_s: float = 20.0) -> None:
        self._half_life_s = half_life_s
        self.rate: float | None = None
        self._amounts = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        if amount <= 0 or seconds < MIN_SECONDS:
            return
        fading = 0.5 ** (seconds / self._half_life_s)
        self._amounts = self._amounts * fading + amount * amount
        self._seconds = self._seconds * fading + amount * seconds
        self.rate = self._amounts / self._seconds


class TargetRates:
    """Rates of one target; None where nothing has been measured."""

    def __init__(self) -> None:
        self._prefill = Meter()
        self._decode = Meter()
        self._fetch: dict[Tier, Meter] = {}
        self._last: EngineLoad | None = None

    @property
    def prefill(self) -> float | None:
        """Prompt tokens/s of steps with prompts in them: what decodes beside them makes it smaller."""
        return self._prefill.rate

    @property
    def decode(self) -> float | None:
        """Context tokens that decode steps attend to, per second."""
        return self._decode.rate

    def fetch(self, tier: Tier) -> float | None:
        meter = self._fetch.get(tier)
        return meter.rate if meter else None

    def observe(self, load: EngineLoad) -> None:
        """Take a report. Counters that went back are those of a new process: it is compared with the next one."""
        last, self._last = self._last, load
        if last is None or load.steps_total < last.steps_total:
            return
        self._prefill.add(
            load.prefill_tokens_total - last.prefill_tokens_total,
            load.prefill_busy_s_total - last.prefill_busy_s_total,
        )
        self._decode.add(
            load.decode_context_tokens_total - last.decode_context_tokens_total,
            load.decode_busy_s_total - last.decode_busy_s_total,
        )

        if load.kv_store is not None:
            before = {} if last.kv_store is None else last.kv_store.fetched
            for tier, total in load.kv_store.fetched.items():
                known = before.get(tier)
                tokens, seconds = (0, 0.0) if known is None else (known.tokens, known.seconds)
                self.observe_fetch(tier, total.tokens - tokens, total.seconds - seconds)

    def observe_fetch(self, tier: Tier, tokens: int, seconds: float) -> None:
        """Take the measurement of one load of a tier's blocks."""
        self._fetch.setdefault(tier, Meter()).add(tokens, seconds)
