"""Who may be sent to a pool now, who waits, and who is refused.

A pool's engines hold at most so many seconds' worth of prompts; what comes beyond waits here, where it can still go to
the target that is best by then, in order of priority. Time comes from the clock; what happens to a ticket is told
through its callback, so that nothing here waits.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from itertools import count
from typing import Literal

import msgspec

from engine.errors import PressureError

TicketState = Literal["waiting", "admitted", "shed", "left", "settled"]

ShedReason = Literal["queue_full", "displaced", "queue_timeout", "deadline"]
"""Why a request got no turn: there was no place; its place went to one that goes first; it waited as long as anybody
may; its own time was over."""

PriorityClass = Literal["interactive", "default", "batch"]

REMEMBERED_WAITS = 10_000
"""Waits that nobody has taken yet: at a thousand requests a second, those of ten seconds."""


class AdmissionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`budget_s` of prompts may be under way in the pool's engines; `max_queued` requests wait behind that, each for
    `max_wait_s` at most. A request of priority p is served as if it had come p * `aging_s` later: a smaller number goes
    first, and nobody starves. Priorities beyond `max_priority` either way count as that.
    """

    budget_s: float = 30.0
    max_queued: int = 1024
    max_wait_s: float = 120.0
    aging_s: float = 10.0
    max_priority: int = 10


class Ticket:
    """One request at the door. `on_end` is called once, when it stops waiting: admitted or shed."""

    __slots__ = ("came_s", "on_end", "priority", "state", "tokens")

    def __init__(self, tokens: int, priority: int, came_s: float, on_end: Callable[[Ticket], None]) -> None:
        self.tokens = tokens
        self.priority = priority
        self.came_s = came_s
        self.on_end = on_end
        self.state: TicketState = "waiting"


class Admission:
    """`backlog` returns the prompt tokens under way and the tokens/s of the pool (None: unknown, nothing waits).

    An admitted ticket counts against the budget until `settle`, which its holder calls when the request has been sent
    and the backlog knows of it.
    """

    def __init__(
        self,
        backlog: Callable[[], tuple[float, float | None]],
        clock: Callable[[], float],
        limits: AdmissionLimits | None = None,
    ) -> None:
        self.limits = limits or AdmissionLimits()
        self.shed: Counter[ShedReason] = Counter()
        self._waits: deque[float] = deque(maxlen=REMEMBERED_WAITS)
        self._backlog = backlog
        self._clock = clock
        self._order = count()
        self._heap: list[tuple[float, int, Ticket]] = []
        self._waiting: Counter[int] = Counter()  # by priority, none of them 0
        self._queued = 0
        self._queued_tokens = 0
        self._unsettled_tokens = 0

    @property
    def queued(self) -> int:
        return self._queued

    @property
    def queued_by_class(self) -> dict[PriorityClass, int]:
        classes: dict[PriorityClass, int] = {"interactive": 0, "default": 0, "batch": 0}
        for priority, queued in self._waiting.items():
            classes[class_of(priority)] += queued
        return classes

    @property
    def queued_tokens(self) -> int:
        return self._queued_tokens

    @property
    def unsettled_tokens(self) -> int:
        """Tokens of the tickets that were admitted and not yet settled."""
        return self._unsettled_tokens

    def offer(
        self,
        tokens: int,
        priority: int,
        on_end: Callable[[Ticket], None],
        uncached: Callable[[], int] | None = None,
    ) -> Ticket:
        """Return a ticket: admitted at once (`on_end` is not called then), or waiting. `tokens` are a prompt's, and
        `uncached` tells how many of them have to be computed: it is asked where the prompt does not fit whole.

        Raises PressureError when the queue is full, unless it goes before one that waits: the last one is shed instead.
        """
        if uncached is not None and (self._queued or not self._fits(tokens)):
            tokens = uncached()
        most = self.limits.max_priority
        ticket = Ticket(tokens, max(-most, min(most, priority)), self._clock(), on_end)
        if self._queued == 0 and self._fits(tokens):
            self._admit(ticket)
            return ticket
        due_s = ticket.came_s + ticket.priority * self.limits.aging_s
        if self._queued >= self.limits.max_queued:
            self._make_room_for(ticket, due_s)
        heapq.heappush(self._heap, (due_s, next(self._order), ticket))
        self._waiting[ticket.priority] += 1
        self._queued += 1
        self._queued_tokens += tokens
        return ticket

    def pump(self) -> None:
        """Admit those whose turn it is. To be called whenever the backlog may have become smaller."""
        while self._queued:
            self._skip_ended()
            ticket = self._heap[0][2]
            if not self._fits(ticket.tokens):
                return
            heapq.heappop(self._heap)
            self._leave_queue(ticket)
            self._admit(ticket)
            ticket.on_end(ticket)

    def leave(self, ticket: Ticket, reason: ShedReason | None = None) -> None:
        """The request has waited too long, for a reason that is counted, or is not wanted any more (None). Of no effect
        on a ticket that does not wait."""
        if ticket.state == "waiting":
            self._leave_queue(ticket)
            ticket.state = "left"
            if reason is not None:
                self.shed[reason] += 1

    def take_waits(self) -> list[float]:
        """Return how long those that were admitted since the last call had waited, in seconds; 0 for no wait at all."""
        waits = list(self._waits)
        self._waits.clear()
        return waits

    def settle(self, ticket: Ticket) -> None:
        """The admitted request has been sent, or has been given up. Only the first call counts."""
        if ticket.state == "admitted":
            ticket.state = "settled"
            self._unsettled_tokens -= ticket.tokens

    def refusal(self, reason: ShedReason) -> PressureError:
        """Return what to tell a request that gets no turn: with the time in which the queue moves on."""
        _, rate = self._backlog()
        wait_s = self._queued_tokens / rate if rate else 1.0
        message = {
            "queue_full": "The queue is full.",
            "displaced": "The queue is full, and a request that goes first took this one's place.",
            "queue_timeout": f"The request waited {self.limits.max_wait_s:g} s in the queue and its turn did not come.",
            "deadline": "The request's deadline passed while it was queued.",
        }[reason]
        return PressureError(message, retry_after_s=min(60.0, max(1.0, wait_s)))

    def _fits(self, tokens: int) -> bool:
        """Whether the pool may take so many more. An idle one takes any prompt."""
        backlog, rate = self._backlog()
        taken = backlog + self._unsettled_tokens
        return rate is None or taken == 0 or taken + tokens <= self.limits.budget_s * rate

    def _admit(self, ticket: Ticket) -> None:
        ticket.state = "admitted"
        self._unsettled_tokens += ticket.tokens
        self._waits.append(self._clock() - ticket.came_s)

    def _leave_queue(self, ticket: Ticket) -> None:
        self._queued -= 1
        self._queued_tokens -= ticket.tokens
        self._waiting[ticket.priority] -= 1
        if not self._waiting[ticket.priority]:
            del self._waiting[ticket.priority]
        if not self._queued:
            self._heap.clear()
        elif len(self._heap) > 2 * self._queued + 64:
            # Mostly tickets that left: they are skipped when their turn comes, which may be late.
            self._heap = [entry for entry in self._heap if entry[2].state == "waiting" and entry[2] is not ticket]
            heapq.heapify(self._heap)

    def _skip_ended(self) -> None:
        while self._heap[0][2].state != "waiting":
            heapq.heappop(self._heap)

    def _make_room_for(self, ticket: Ticket, due_s: float) -> None:
        """Shed the one that would go last, if the newcomer goes before it; else raise.

        Only one of a lower class can, and only until it has aged: who came earlier and is no lower goes first anyway.
        """
        if max(self._waiting, default=ticket.priority) > ticket.priority:
            last_due_s, _, last = max(entry for entry in self._heap if entry[2].state == "waiting")
            if due_s < last_due_s:
                self.shed["displaced"] += 1
                self._leave_queue(last)
                last.state = "shed"
                last.on_end(last)
                return
        self.shed["queue_full"] += 1
        raise self.refusal("queue_full")


def class_of(priority: int) -> PriorityClass:
    """Return the name that metrics know a priority by."""
    return "interactive" if priority < 0 else "batch" if priority > 0 else "default"
