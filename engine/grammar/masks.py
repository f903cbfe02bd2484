"""Masks of a step's rows, made in threads of their own while somebody else computes. Knows matchers, no requests.

Not the threads that compile: a mask takes microseconds, and a step waits for it; a grammar may take seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from engine.grammar.base import Matcher

THREADS = 4
MATCHERS_PER_TASK = 16
"""Going over to another thread costs as much as some masks."""


class PendingMasks:
    """Masks in the making. Until they are joined nobody else may use their matchers."""

    def __init__(self, parts: Sequence[Future[bytes]]) -> None:
        self._parts = parts

    def join(self) -> bytes:
        """Wait for the masks; return them one behind the other, in the order of the matchers."""
        return b"".join(part.result() for part in self._parts)


class MaskThreads:
    """The threads start with the first masks and end with `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def start(self, matchers: Sequence[Matcher]) -> PendingMasks:
        """Begin to make a mask for each matcher."""
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(THREADS, "masks")
            executor = self._executor
        starts = range(0, len(matchers), MATCHERS_PER_TASK)
        return PendingMasks([executor.submit(_masks, matchers[at : at + MATCHERS_PER_TASK]) for at in starts])

    def close(self) -> None:
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)


def _masks(matchers: Sequence[Matcher]) -> bytes:
    return b"".join(matcher.mask() for matcher in matchers)
