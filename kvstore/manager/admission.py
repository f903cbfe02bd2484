"""Which blocks are worth a slower tier's room once that is scarce: those that were seen before."""

from __future__ import annotations

import threading

PRESSURE = 0.7
"""Share of a tier's capacity above which a block needs a second sighting, or a parent that had one."""

MAX_SEEN = 1 << 17


class Sightings:
    """Counts of block keys that fade: all are halved whenever as many were counted as are kept."""

    def __init__(self, max_seen: int = MAX_SEEN) -> None:
        self._max_seen = max_seen
        self._counts: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def note(self, key: bytes) -> int:
        """Count a sighting; return how many there have been."""
        with self._lock:
            count = self._counts[key] = self._counts.get(key, 0) + 1
            if len(self._counts) > self._max_seen:
                self._counts = {one: half for one, seen in self._counts.items() if (half := seen // 2)}
                # Too many of them are known well: what is new has to be counted all the same.
                while len(self._counts) > self._max_seen // 2:
                    del self._counts[next(iter(self._counts))]
            return count

    def count(self, key: bytes) -> int:
        return self._counts.get(key, 0)
