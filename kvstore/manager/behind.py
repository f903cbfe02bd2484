"""Objects on their way from memory to a slower tier. Nobody waits for them: what does not fit into the queue, comes
too late or was evicted meanwhile is not written, and is counted."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict

from kvstore.object_key import ObjectKey
from kvstore.ram.leases import Lease
from kvstore.ram.tier import RamTier
from kvstore.tier import Deadline, Outcome, Put, Tier

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 1 << 30
MAX_AGE_S = 60.0
MAX_WRITING_BYTES = 64 << 20
SAVE_S = 30.0
"""Time that one object's writing may take, in the tier's own queue too."""

HOLDER = "write-behind"


class WriteBehind:
    """Between memory and one tier, with a thread of its own. Objects that wait hold no memory of theirs."""

    def __init__(self, ram: RamTier, tier: Tier, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        self.tier = tier
        self._ram, self._max_queued_bytes = ram, max_queued_bytes
        self._condition = threading.Condition()
        self._queue: OrderedDict[ObjectKey, tuple[int, float]] = OrderedDict()
        self._queued_bytes = self._writing_bytes = 0
        self._closing = False
        self._counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name=f"kv-behind-{tier.name}", daemon=True)
        self._thread.start()

    def add(self, key: ObjectKey, size_bytes: int) -> None:
        with self._condition:
            if self._closing or key in self._queue:
                return
            self._queue[key] = (size_bytes, time.monotonic())
            self._queued_bytes += size_bytes
            while self._queued_bytes > self._max_queued_bytes:
                self._queued_bytes -= self._queue.popitem(last=False)[1][0]
                self._counts["overflow"] += 1
            self._condition.notify_all()

    def count(self, what: str) -> None:
        with self._condition:
            self._counts[what] += 1

    def forget(self) -> None:
        """Drop all that waits."""
        with self._condition:
            self._queue.clear()
            self._queued_bytes = 0

    def flush(self, deadline: Deadline) -> bool:
        """Wait until nothing is queued or being written; return whether that came in time."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._queue and not self._writing_bytes, deadline.left_s)

    def figures(self) -> tuple[int, int, dict[str, int]]:
        """Return the objects and bytes that wait, and how all that were taken ended."""
        with self._condition:
            return len(self._queue), self._queued_bytes, dict(self._counts)

    def close(self, deadline: Deadline) -> None:
        self.flush(deadline)
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(deadline.left_s + 1.0)

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            key, size_bytes = taken
            lease = self._ram.lease(key, HOLDER)
            if lease is None:
                self._done("evicted", size_bytes)
            else:
                self._write(lease, size_bytes)

    def _next(self) -> tuple[ObjectKey, int] | None:
        """Wait for an object that may be written; its bytes count as being written from here on."""
        with self._condition:
            while True:
                self._condition.wait_for(
                    lambda: self._closing or (self._queue and self._writing_bytes < MAX_WRITING_BYTES)
                )
                if self._closing:
                    return None
                key, (size_bytes, since_s) = self._queue.popitem(last=False)
                self._queued_bytes -= size_bytes
                if time.monotonic() - since_s > MAX_AGE_S:
                    self._counts["late"] += 1
                    self._condition.notify_all()
                    continue
                self._writing_bytes += size_bytes
                return key, size_bytes

    def _write(self, lease: Lease, size_bytes: int) -> None:
        def report(index: int, outcome: Outcome) -> None:
            lease.release()
            self._done(outcome.status, size_bytes)

        self.tier.save([Put(lease.key, (lease.view,))], Deadline.after(SAVE_S), report)

    def _done(self, what: str, size_bytes: int) -> None:
        with self._condition:
            self._counts[what] += 1
            self._writing_bytes -= size_bytes
            self._condition.notify_all()
