"""Rates for every target of a pool: its own where they have been measured, else what the others show."""

from __future__ import annotations

from router.rates import FETCH_SPEEDUP, PRIOR_RATE, TargetRates
from router.values import Tier

DECODE_SPEEDUP = 1000.0
"""How many times more context tokens than prompt tokens a second is assumed to cover, until it has been measured:
attending to a cached token costs two vectors' products, computing one the whole model."""


class _Mean:
    """The mean over the targets that have a value."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._values: dict[str, float] = {}
        self._sum = 0.0

    def set(self, target_id: str, value: float | None) -> None:
        self._sum -= self._values.pop(target_id, 0.0)
        if value is not None:
            self._values[target_id] = value
            self._sum += value
        if not self._values:
            self._sum = 0.0
        self.value = self._sum / len(self._values) if self._values else None


class PoolRates:
    """Keeps the means over the targets that have measurements."""

    def __init__(self) -> None:
        self._prefill = _Mean()
        self._decode = _Mean()

    @property
    def is_measured(self) -> bool:
        """Whether any target's prefill rate is known."""
        return self._prefill.value is not None

    def note(self, target_id: str, rates: TargetRates) -> None:
        """Take a target's present measurements into the means."""
        self._prefill.set(target_id, rates.prefill)
        self._decode.set(target_id, rates.decode)

    def forget(self, target_id: str) -> None:
        self._prefill.set(target_id, None)
        self._decode.set(target_id, None)

    def prefill(self, rates: TargetRates) -> float:
        return rates.prefill or self._prefill.value or PRIOR_RATE

    def decode(self, rates: TargetRates) -> float:
        return rates.decode or self._decode.value or DECODE_SPEEDUP * self.prefill(rates)

    def fetch(self, rates: TargetRates) -> dict[Tier, float]:
        prefill = self.prefill(rates)
        return {tier: rates.fetch(tier) or speedup * prefill for tier, speedup in FETCH_SPEEDUP.items()}
