"""One target as a dispatcher knows it, and the leases on it."""

from __future__ import annotations

from typing import Protocol

import msgspec

from engine.protocol import CachedTokens, EngineLoad, Outcome
from router.breaker import Breaker, BreakerLimits, BreakerState
from router.decision import Decision
from router.in_flight import OWN, TargetBooks
from router.rates import TargetRates
from router.values import Hit, TargetState


class TargetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one target now, for those who look. `drift` is as in `TargetBooks.drift`."""

    target_id: str
    state: TargetState
    breaker: BreakerState
    breaker_trips: int
    in_flight: int
    in_flight_tokens: int
    queued_uncached_tokens: int
    drift: int | None
    prefill_rate: float | None
    load: EngineLoad | None


class Member:
    """State, books, rates and breaker of one target, from when it was added until it is removed."""

    def __init__(self, target_id: str, state: TargetState, breaker_limits: BreakerLimits) -> None:
        self.target_id = target_id
        self.state = state
        self.books = TargetBooks()
        self.rates = TargetRates()
        self.breaker = Breaker(breaker_limits)

    def status(self, now_s: float) -> TargetStatus:
        return TargetStatus(
            target_id=self.target_id,
            state=self.state,
            breaker=self.breaker.state(now_s),
            breaker_trips=self.breaker.trips,
            in_flight=self.books.in_flight,
            in_flight_tokens=self.books.in_flight_tokens,
            queued_uncached_tokens=self.books.queued_uncached_tokens(now_s),
            drift=self.books.drift(now_s),
            prefill_rate=self.rates.prefill,
            load=self.books.load,
        )


class LeaseOwner(Protocol):
    """Whoever gave a lease and wants to know what becomes of it."""

    def clock(self) -> float: ...

    def note_answer(self, lease: DispatchLease, cached: CachedTokens | None) -> None: ...

    def note_release(self, lease: DispatchLease, outcome: Outcome) -> None: ...

    def note_trip(self, target_id: str) -> None: ...


class DispatchLease:
    """One request's claim on one target: released once, however often it is asked to be.

    It keeps the member that it was entered with: when the target was removed and added anew meanwhile, the new one's
    books are not touched.
    """

    def __init__(
        self, member: Member, lease_id: int, decision: Decision, hit: Hit, block_size: int, owner: LeaseOwner
    ) -> None:
        self.lease_id = lease_id
        self.decision = decision
        self.hit = hit
        self.block_size = block_size
        self._member = member
        self._owner: LeaseOwner | None = owner
        self._is_probe = member.breaker.begin(decision.at_s)
        self._is_answered = False

    @property
    def target_id(self) -> str:
        return self._member.target_id

    def first_output(self, cached: CachedTokens | None) -> None:
        """The target has computed the prompt, all but what was `cached` (None: it does not say). The first call
        counts."""
        if self._owner is None or self._is_answered:
            return
        self._is_answered = True
        self._member.books.answer((OWN, self.lease_id))
        if self._is_probe:
            self._is_probe = False
            self._member.breaker.probe_answered()
        self._owner.note_answer(self, cached)

    def release(self, outcome: Outcome) -> None:
        owner, self._owner = self._owner, None
        if owner is None:
            return
        self._member.books.end((OWN, self.lease_id))
        if self._member.breaker.end(outcome, owner.clock(), is_probe=self._is_probe):
            owner.note_trip(self.target_id)
        owner.note_release(self, outcome)
