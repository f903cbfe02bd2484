"""Threads that each have a connection of their own, and what all of them do: take work, in order and several pieces at
once, leave a failing server alone, and end what breaks.

As a socket can always be left, a piece is reported by its lane alone, when nothing uses its memory any more, and at its
deadline at the latest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from kvstore.breaker import Breaker
from kvstore.remote.connect import Connector, LinkSlot
from kvstore.remote.link import ErrorReplyError, Link, LinkBrokenError, LinkSlowError
from kvstore.tier import Deadline, Outcome
from kvstore.work import Job, Kind, WorkQueue

log = logging.getLogger(__name__)

T = TypeVar("T")

WINDOW_BYTES = 8 << 20
WINDOW_PIECES = 64

PATIENCE_S = 0.05
"""A piece that was late after less than this had too little time: that says nothing of the server."""


class Pieces(Generic[T]):
    """What a lane has taken out of its queue and not ended, in order. `busy_s` is since the last one ended."""

    def __init__(self, queue: WorkQueue[T], jobs: Sequence[Job[T]]) -> None:
        self._queue, self._jobs = queue, list(jobs)
        self._begun_s = time.monotonic()

    def __len__(self) -> int:
        return len(self._jobs)

    def first(self, count: int) -> list[Job[T]]:
        return self._jobs[:count]

    def end(self, job: Job[T], outcome: Outcome) -> None:
        self._jobs.remove(job)
        busy_s, self._begun_s = self.busy_s, time.monotonic()
        self._queue.done(job)
        job.finish(outcome, busy_s)

    def end_first(self, count: int, outcome: Outcome) -> None:
        for job in self.first(count):
            self.end(job, outcome)

    @property
    def busy_s(self) -> float:
        return time.monotonic() - self._begun_s


class Exchange(Protocol[T]):
    """One round of asking and answering."""

    def __call__(self, link: Link, pieces: Pieces[T], count: int) -> bool | None:
        """Do the first `count` pieces and end each that is done; some may be left. Return whether the server did well,
        None when it was not asked. Raises LinkBrokenError and ErrorReplyError, which happened to the first that is
        left."""
        ...


class Lane(Generic[T]):
    """`window_pieces` is the most that is asked for at once."""

    def __init__(
        self,
        kind: Kind,
        queue: WorkQueue[T],
        breaker: Breaker,
        connector: Connector,
        exchange: Exchange[T],
        window_pieces: int = WINDOW_PIECES,
    ) -> None:
        self._kind, self._queue, self._breaker, self._exchange = kind, queue, breaker, exchange
        self._connector, self._window_pieces = connector, window_pieces
        self._slot = LinkSlot(connector)

    def run(self) -> None:
        """Work until the queue is closed."""
        while (job := self._queue.take(self._kind)) is not None:
            rest = self._queue.take_more(self._kind, WINDOW_BYTES - job.size_bytes, self._window_pieces - 1)
            pieces = Pieces(self._queue, [job, *rest])
            try:
                while pieces:
                    self._serve(pieces)
            except Exception as error:
                log.exception("a fault in the remote tier")
                self._slot.drop()
                pieces.end_first(len(pieces), Outcome("failed", detail=repr(error)))
        self._slot.drop()

    def _serve(self, pieces: Pieces[T]) -> None:
        """End at least one piece. What breaks ends the piece that it happened to; the others are tried again."""
        if pieces.first(1)[0].deadline.passed:
            pieces.end_first(1, Outcome("late"))
            return
        if not self._breaker.admit():
            pieces.end_first(len(pieces), Outcome("refused", detail="the breaker is open"))
            return
        # One piece finds out whether a failing server is back.
        count = len(pieces) if self._breaker.state == "closed" else 1
        did_well: bool | None = None
        try:
            did_well = self._attempt(pieces, count)
        finally:
            tell = {True: self._breaker.succeeded, False: self._breaker.failed, None: self._breaker.unknown}
            tell[did_well]()

    def _attempt(self, pieces: Pieces[T], count: int) -> bool | None:
        """Return whether the server did well, None when that is not known."""
        deadline = pieces.first(1)[0].deadline
        try:
            link = self._slot.get(deadline)
        except (LinkBrokenError, ErrorReplyError) as error:
            return self._broke(pieces, count, error)
        try:
            return self._exchange(link, pieces, count)
        except (LinkBrokenError, ErrorReplyError) as error:
            stale = self._slot.was_stale and not isinstance(error, LinkSlowError)
            self._slot.drop()
            # The next attempt has a new link, so that one cannot be stale.
            return None if stale else self._broke(pieces, 1, error)

    def _broke(self, pieces: Pieces[T], count: int, error: Exception) -> bool | None:
        """End the first `count` pieces, and return what that says of the server."""
        deadline, busy_s = pieces.first(1)[0].deadline, pieces.busy_s
        if self._connector.is_closed:
            pieces.end_first(count, Outcome("cancelled"))
            return None
        pieces.end_first(count, Outcome("late" if deadline.passed else "failed", detail=str(error)))
        return None if deadline.passed and busy_s < PATIENCE_S else False


def soonest(deadline: Deadline, seconds: float) -> Deadline:
    """Return the deadline, or that many seconds from now where that is sooner."""
    return Deadline(min(deadline.at_s, time.monotonic() + seconds))
