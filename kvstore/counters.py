"""What a tier counts while it works, for TierStats and the metrics made of it."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from typing import Any

from kvstore.tier import DURATION_BUCKETS_S, Outcome, Status


class TierCounters:
    """Cumulative; safe to use from all of a tier's threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: Counter[Status] = Counter()
        self._saves: Counter[Status] = Counter()
        self._corrupt: Counter[str] = Counter()
        self._load_bytes = self._save_bytes = self._evictions = self._evicted_bytes = 0
        self._load_busy_s = self._save_busy_s = 0.0
        self._load_durations = [0] * (len(DURATION_BUCKETS_S) + 1)
        self._save_durations = [0] * (len(DURATION_BUCKETS_S) + 1)

    def loaded(self, outcome: Outcome, busy_s: float = 0.0) -> None:
        """One load ended, `busy_s` after it was begun."""
        with self._lock:
            self._loads[outcome.status] += 1
            self._load_bytes += outcome.size_bytes
            self._load_busy_s += busy_s
            if outcome.status == "ok":
                self._load_durations[bisect_left(DURATION_BUCKETS_S, busy_s)] += 1

    def saved(self, outcome: Outcome, busy_s: float = 0.0) -> None:
        with self._lock:
            self._saves[outcome.status] += 1
            self._save_bytes += outcome.size_bytes
            self._save_busy_s += busy_s
            if outcome.status == "ok":
                self._save_durations[bisect_left(DURATION_BUCKETS_S, busy_s)] += 1

    def corrupt(self, fault: str) -> None:
        with self._lock:
            self._corrupt[fault] += 1

    def evicted(self, size_bytes: int) -> None:
        with self._lock:
            self._evictions += 1
            self._evicted_bytes += size_bytes

    def fields(self) -> dict[str, Any]:
        """Return the fields of TierStats that are counted here."""
        with self._lock:
            return {
                "loads": dict(self._loads),
                "saves": dict(self._saves),
                "corrupt": dict(self._corrupt),
                "load_bytes_total": self._load_bytes,
                "save_bytes_total": self._save_bytes,
                "load_busy_s_total": self._load_busy_s,
                "save_busy_s_total": self._save_busy_s,
                "load_durations": list(self._load_durations),
                "save_durations": list(self._save_durations),
                "evictions_total": self._evictions,
                "evicted_bytes_total": self._evicted_bytes,
            }
