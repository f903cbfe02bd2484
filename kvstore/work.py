"""Work for a tier's threads: loads before saves, nothing that is late, and an eye on what hangs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from kvstore.tier import Deadline, Outcome

T = TypeVar("T")
"""What a tier's threads need to know of a piece of work."""

Kind = Literal["load", "save"]
KINDS: tuple[Kind, Kind] = ("load", "save")

MAX_YIELD_S = 0.1
"""How long a save lets loads that came later go first."""


@dataclass(eq=False, slots=True)
class Job(Generic[T]):
    """`finish` hears how it ended and how many seconds it took, exactly once.

    `hanging` is set when it was still running after its deadline: what becomes of it says nothing new then.
    """

    kind: Kind
    work: T
    finish: Callable[[Outcome, float], None]
    deadline: Deadline
    size_bytes: int = 0
    queued_s: float = 0.0
    hanging: bool = False


class WorkQueue(Generic[T]):
    """Jobs of two kinds that wait, and those that were taken out and are not done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._came: dict[Kind, threading.Condition] = {kind: threading.Condition(self._lock) for kind in KINDS}
        self._changed = threading.Condition(self._lock)
        self._waiting: dict[Kind, deque[Job[T]]] = {kind: deque() for kind in KINDS}
        self._running: set[Job[T]] = set()
        self._closed = False

    def put(self, kind: Kind, jobs: Sequence[Job[T]]) -> bool:
        """Return False, and take none, when the queue is closed."""
        with self._lock:
            if self._closed:
                return False
            for job in jobs:
                job.queued_s = time.monotonic()
            self._waiting[kind].extend(jobs)
            self._came[kind].notify(len(jobs))
            self._changed.notify_all()
            return True

    def take(self, kind: Kind) -> Job[T] | None:
        """Wait for a job; None when there will be no more. `done` follows."""
        with self._lock:
            while True:
                waiting = self._waiting[kind]
                if waiting and (kind == "load" or not self._yields(waiting[0])):
                    job = waiting.popleft()
                    self._running.add(job)
                    return job
                if self._closed and not waiting:
                    return None
                self._came[kind].wait(MAX_YIELD_S if waiting else None)

    def take_more(self, kind: Kind, size_bytes: int, count: int) -> list[Job[T]]:
        """Return up to `count` further jobs that wait, together of at most `size_bytes`: without waiting, perhaps none.
        `done` follows for each."""
        taken: list[Job[T]] = []
        with self._lock:
            waiting = self._waiting[kind]
            while waiting and len(taken) < count and waiting[0].size_bytes <= size_bytes:
                size_bytes -= waiting[0].size_bytes
                taken.append(waiting.popleft())
            self._running.update(taken)
        return taken

    def done(self, job: Job[T]) -> None:
        with self._lock:
            self._running.remove(job)
            if self._waiting["save"] and not self._waiting["load"]:
                self._came["save"].notify_all()
            self._changed.notify_all()

    def expire(self) -> tuple[list[Job[T]], list[Job[T]]]:
        """Return the jobs whose deadline has passed: those that waited, which are taken out, and those that are still
        running, each of them once."""
        late: list[Job[T]] = []
        with self._lock:
            for kind, waiting in self._waiting.items():
                kept: deque[Job[T]] = deque()
                for job in waiting:
                    (late if job.deadline.passed else kept).append(job)
                self._waiting[kind] = kept
            hanging = [job for job in self._running if not job.hanging and job.deadline.passed]
            for job in hanging:
                job.hanging = True
            self._changed.notify_all()
        return late, hanging

    def wait_busy(self) -> bool:
        """Wait until something waits or runs; False when there will be nothing more."""
        with self._lock:
            self._changed.wait_for(lambda: self._closed or self._busy)
            return self._busy

    def wait_idle(self, deadline: Deadline) -> None:
        """Wait until nothing waits or runs, or the deadline."""
        with self._lock:
            self._changed.wait_for(lambda: not self._busy, deadline.left_s)

    def close(self) -> None:
        """Take no more jobs; threads end when those that wait are done."""
        with self._lock:
            self._closed = True
            for condition in (*self._came.values(), self._changed):
                condition.notify_all()

    def cancel(self) -> list[Job[T]]:
        """Take out all that waits."""
        with self._lock:
            jobs = [job for waiting in self._waiting.values() for job in waiting]
            for waiting in self._waiting.values():
                waiting.clear()
            self._changed.notify_all()
        return jobs

    def waiting(self, kind: Kind) -> tuple[int, int]:
        """Return how many jobs wait, and the sum of their bytes."""
        with self._lock:
            jobs = self._waiting[kind]
            return len(jobs), sum(job.size_bytes for job in jobs)

    @property
    def _busy(self) -> bool:
        return bool(self._running) or any(self._waiting.values())

    def _yields(self, job: Job[T]) -> bool:
        return bool(self._waiting["load"]) and time.monotonic() - job.queued_s < MAX_YIELD_S
