"""What fetching blocks is predicted to take, and computing them: loads that do not pay are not begun."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstore.tier import TierName

MIN_BENEFIT = 0.1
"""Share of the time to compute that a load has to save."""

WEIGHT = 0.2
"""Of a new measurement in the running averages."""

FIRST_RATES: dict[TierName, float] = {"ram": 4e9, "disk": 1e9, "remote": 0.5e9}
"""Bytes a second that are assumed until something was measured."""

FIRST_LATENCIES: dict[TierName, float] = {"ram": 0.0002, "disk": 0.001, "remote": 0.002}


PROBE_BLOCKS = 16
PROBE_AFTER_S = 60.0
PROBE_PATIENCE = 1000.0
"""What does not pay today may pay later, or is only believed not to: now and then such a load is begun all the same, of
a few blocks, and no more often than that it costs a thousandth of the time."""


class FetchCost:
    """Running averages of one client. Seconds and bytes are those of whole loads, checks and copies included."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.rates: dict[TierName, float] = dict(FIRST_RATES)
        self.measured: set[TierName] = set()
        self.prefill_rate: float | None = None
        """Tokens a second, None until the engine told."""
        self.fetched: dict[TierName, tuple[int, float]] = {}
        """Bytes and seconds of all loads so far."""
        self._probe_at: dict[TierName, float] = {}

    def observe(self, tier: TierName, size_bytes: int, seconds: float) -> None:
        """A load of one tier's blocks has ended."""
        if size_bytes and seconds > 0:
            known_bytes, known_s = self.fetched.get(tier, (0, 0.0))
            self.fetched[tier] = (known_bytes + size_bytes, known_s + seconds)
            self.rates[tier] = _mix(self.rates[tier], size_bytes / seconds, first=tier not in self.measured)
            if tier not in self.measured:
                self._probe_at[tier] = self._clock() + PROBE_AFTER_S
            self.measured.add(tier)

    def observe_save(self, size_bytes: int, seconds: float) -> None:
        """Blocks were saved to memory, which takes what loading them takes: until a load was measured the fastest save
        stands for it (the first ones wait for much else)."""
        if seconds > 0 and "ram" not in self.measured:
            self.rates["ram"] = max(self.rates["ram"], size_bytes / seconds)

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
        """Return how many leading blocks to load: where most time is saved, or a few of a tier that is to be tried."""
        if self.prefill_rate is None:
            return len(tiers)
        best, best_s = 0, 0.0
        ends = [i for i in range(1, len(tiers) + 1) if i == len(tiers) or tiers[i] != tiers[i - 1]]
        for end in ends:
            compute_s = end * block_size / self.prefill_rate
            saved_s = compute_s - self.fetch_s(tiers[:end], block_bytes)
            if saved_s > best_s and saved_s >= MIN_BENEFIT * compute_s:
                best, best_s = end, saved_s
        return best if best or not tiers else self._probe(tiers[: min(ends[0], PROBE_BLOCKS)], block_bytes, block_size)

    def _probe(self, tiers: Sequence[TierName], block_bytes: int, block_size: int) -> int:
        assert self.prefill_rate is not None
        now = self._clock()
        if now < self._probe_at.get(tiers[0], now):
            return 0
        lost_s = self.fetch_s(tiers, block_bytes) - len(tiers) * block_size / self.prefill_rate
        self._probe_at[tiers[0]] = now + max(PROBE_AFTER_S, PROBE_PATIENCE * lost_s)
        return len(tiers)


def _mix(known: float, new: float, *, first: bool) -> float:
    return new if first else (1 - WEIGHT) * known + WEIGHT * new
