"""What fetching blocks is predicted to take, and computing them: loads that do not pay are not begun."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.tier import TierName

MIN_BENEFIT = 0.1
"""Share of the time to compute that a load has to save."""

WEIGHT = 0.2
"""Of a new measurement in the running averages."""

FIRST_RATES: dict[TierName, float] = {"ram": 4e9, "disk": 1e9, "remote": 0.5e9}
"""Bytes a second that are assumed until something was measured."""

FIRST_LATENCIES: dict[TierName, float] = {"ram": 0.0002, "disk": 0.001, "remote": 0.002}


class FetchCost:
    """Running averages of one client. Seconds and bytes are those of whole loads, checks and copies included."""

    def __init__(self) -> None:
        self.rates: dict[TierName, float] = dict(FIRST_RATES)
        self.measured: set[TierName] = set()
        self.prefill_rate: float | None = None
        """Tokens a second, None until the engine told."""

    def observe(self, tier: TierName, size_bytes: int, seconds: float) -> None:
        if size_bytes and seconds > 0:
            self.rates[tier] = _mix(self.rates[tier], size_bytes / seconds, first=tier not in self.measured)
            self.measured.add(tier)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        if tokens and seconds > 0:
            known = self.prefill_rate
            self.prefill_rate = _mix(known or 0.0, tokens / seconds, first=known is None)

    def fetch_s(self, tiers: Sequence[TierName], block_bytes: int) -> float:
        """Predict the seconds that blocks of these tiers take; what is fetched from several comes one after another."""
        return sum(
            FIRST_LATENCIES[tier] + tiers.count(tier) * block_bytes / self.rates[tier] for tier in dict.fromkeys(tiers)
        )

    def worthwhile(self, tiers: Sequence[TierName], block_bytes: int, block_size: int) -> int:
        """Return how many leading blocks to load: where most time is saved, 0 where it is less than MIN_BENEFIT."""
        if self.prefill_rate is None:
            return len(tiers)
        best, best_s = 0, 0.0
        ends = [i for i in range(1, len(tiers) + 1) if i == len(tiers) or tiers[i] != tiers[i - 1]]
        for end in ends:
            compute_s = end * block_size / self.prefill_rate
            saved_s = compute_s - self.fetch_s(tiers[:end], block_bytes)
            if saved_s > best_s and saved_s >= MIN_BENEFIT * compute_s:
                best, best_s = end, saved_s
        return best


def _mix(known: float, new: float, *, first: bool) -> float:
    return new if first else (1 - WEIGHT) * known + WEIGHT * new
