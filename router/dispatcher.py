"""The heart of one pool: which target a request goes to, and what is under way where.

No sockets, no tasks, no sleeps: time comes from the clock and chance from the generator that it is given, so that the
simulator runs the code that serves. router/routed_pool.py puts it into an event loop.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from engine.protocol import CachedTokens, EngineLoad, Outcome
from router.breaker import BreakerLimits
from router.decision import Decision, options_of
from router.dispatches import MAX_SHARED_KEYS, Dispatch, DispatchObserver
from router.in_flight import OWN, ClaimKey, TargetBooks
from router.member import DispatchLease, Member, TargetStatus
from router.pool_rates import PoolRates
from router.untold import Untold
from router.values import NO_HIT, Candidate, Hit, Policy, Query, Score, TargetState, Tier

TIE = 0.02
"""Costs within this share of the least are equal: what is drawn among them keeps requests from moving in step."""

FULL_KV = 0.95
"""A target whose KV would be fuller than this is passed over while another is not: it would preempt what runs."""


NO_RATES: dict[Tier, float] = {}


class Index(Protocol):
    """What a dispatcher needs of a prefix index."""

    def add_target(self, target_id: str) -> None: ...

    def drop_target(self, target_id: str) -> None: ...

    def speculate(self, target_id: str, keys: Sequence[bytes]) -> None: ...

    def lookup(self, query: Query) -> Mapping[str, Hit]: ...


class Dispatcher:
    """`outcomes` counts ended leases by how they ended. `observer` is told of every lease. `on_answered` is told what
    was predicted of a prompt and what its answer said: target, both, and the block size (`HitCheck.observe`).
    """

    def __init__(
        self,
        policy: Policy,
        index: Index,
        clock: Callable[[], float],
        rng: random.Random,
        *,
        breaker_limits: BreakerLimits | None = None,
    ) -> None:
        self.policy = policy
        self.clock = clock
        self.outcomes: Counter[Outcome] = Counter()
        self.observer: DispatchObserver | None = None
        self.on_answered: Callable[[str, Hit, CachedTokens, int], None] | None = None
        self._index = index
        self._rng = rng
        self._breaker_limits = breaker_limits or BreakerLimits()
        self._members: dict[str, Member] = {}
        self._rates = PoolRates()
        self._last_lease_id = 0
        self._untold_trips: Counter[str] = Counter()
        self._peer_claims: dict[ClaimKey, TargetBooks] = {}
        self._untold = Untold()

    def observe(self, observer: DispatchObserver, own_id: str) -> None:
        """Tell `observer` of every lease. Peers that tell of theirs know this process as `own_id`."""
        self.observer, self._untold.own_id = observer, own_id

    # Targets

    @property
    def target_ids(self) -> Collection[str]:
        return self._members.keys()

    def add_target(self, target_id: str, state: TargetState = "ready") -> None:
        """Begin to know a target. One that is known gets the state and keeps the rest."""
        if member := self._members.get(target_id):
            member.state = state
            return
        self._members[target_id] = Member(target_id, state, self._breaker_limits)
        self._index.add_target(target_id)

    def remove_target(self, target_id: str) -> None:
        """Forget a target. Leases on it may still be released; unknown ids are ignored."""
        if self._members.pop(target_id, None) is None:
            return
        self._index.drop_target(target_id)
        self._rates.forget(target_id)
        if forget := getattr(self.policy, "forget", None):
            forget(target_id)

    def renew_target(self, target_id: str, state: TargetState = "ready") -> None:
        """Another process serves under this id: what was known of the old one's cache, load and faults is void."""
        self.remove_target(target_id)
        self.add_target(target_id, state)

    def set_state(self, target_id: str, state: TargetState) -> bool:
        """Return whether that is news. Unknown ids are ignored."""
        member = self._members.get(target_id)
        if member is None or member.state == state:
            return False
        member.state = state
        return True

    def report_load(self, target_id: str, load: EngineLoad, *, tells_tokens: bool = True) -> None:
        """Take a report of the target's engine, which counts tokens or requests alone. Those of unknown targets are
        late: ignored."""
        if member := self._members.get(target_id):
            member.books.report(load, self.clock(), tells_tokens=tells_tokens)
            member.rates.observe(load)
            self._rates.note(target_id, member.rates)

    def status(self) -> list[TargetStatus]:
        now_s = self.clock()
        return [member.status(now_s) for member in self._members.values()]

    @property
    def in_flight(self) -> dict[str, int]:
        """Claims not yet released, by target; those of peers too."""
        return {one.target_id: one.books.in_flight for one in self._members.values()}

    def backlog(self) -> tuple[float, float | None]:
        """Return the prompt tokens that the ready targets have to compute, and how many they compute in a second (None
        until it has been measured)."""
        now_s, tokens, rate = self.clock(), 0.0, 0.0
        for one in self._members.values():
            if one.state == "ready":
                tokens += one.books.queued_uncached_tokens(now_s)
                rate += self._rates.prefill(one.rates)
        return tokens, rate if self._rates.is_measured else None

    # Decisions

    def uncached_tokens(self, query: Query) -> int:
        """Return how many tokens of a prompt would have to be computed on the ready target that holds most of it."""
        hits = self._index.lookup(query) if query.keys else {}
        ready = (hits.get(one.target_id, NO_HIT).tokens for one in self._members.values() if one.state == "ready")
        return max(1, query.prompt_tokens - max(ready, default=0))

    def choose(
        self, query: Query, exclude: Collection[str] = (), unreachable: Collection[str] = ()
    ) -> DispatchLease | None:
        """Lease the cheapest target; None when no other than those to `exclude` and the `unreachable` is ready."""
        now_s = self.clock()
        members, passed_over, fail_open = self._eligible(exclude, unreachable, now_s)
        if not members:
            return None
        hits = self._index.lookup(query) if query.keys else {}
        untold = self._untold.expected_tokens([one.target_id for one in members])
        candidates = [
            self._candidate(
                one, query, hits.get(one.target_id, NO_HIT), now_s, 0.0 if untold is None else untold[index]
            )
            for index, one in enumerate(members)
        ]
        if len(roomy := [one for one in candidates if one.kv_usage < FULL_KV]) not in (0, len(candidates)):
            passed_over.update((one.target_id, "full") for one in candidates if one.kv_usage >= FULL_KV)
            candidates = roomy
        scores = self.policy.score(query, candidates)
        chosen = self._cheapest(scores)
        hit = candidates[chosen].hit
        decision = Decision(
            request_id=query.request_id,
            policy=self.policy.name,
            target_id=candidates[chosen].target_id,
            at_s=now_s,
            prompt_tokens=query.prompt_tokens,
            predicted_tokens=hit.tokens,
            num_candidates=len(candidates),
            options=options_of(candidates, scores, chosen),
            block_size=query.block_size,
            passed_over=passed_over,
            fail_open=fail_open,
        )
        return self._lease(query, decision, hit)

    def _eligible(
        self, exclude: Collection[str], unreachable: Collection[str], now_s: float
    ) -> tuple[list[Member], dict[str, str], bool]:
        members: list[Member] = []
        broken: list[Member] = []
        passed_over: dict[str, str] = {}
        for one in self._members.values():
            if one.target_id in exclude:
                passed_over[one.target_id] = "excluded"
            elif one.target_id in unreachable:
                passed_over[one.target_id] = "unreachable"
            elif one.state != "ready":
                passed_over[one.target_id] = one.state
            elif not one.breaker.allows(now_s):
                broken.append(one)
            else:
                members.append(one)
        if not members and broken:
            return broken, passed_over, True
        passed_over.update((one.target_id, f"breaker {one.breaker.state(now_s)}") for one in broken)
        return members, passed_over, False

    def _candidate(self, member: Member, query: Query, hit: Hit, now_s: float, untold_tokens: float) -> Candidate:
        books, rates = member.books, member.rates
        queued, decode_tokens, usage = books.view(query.prompt_tokens - hit.device, query.block_size, now_s)
        return Candidate(
            target_id=member.target_id,
            in_flight=books.in_flight,
            in_flight_tokens=books.in_flight_tokens,
            unanswered=books.unanswered,
            queued_uncached_tokens=queued + untold_tokens,
            decode_tokens=float(decode_tokens),
            kv_usage=usage,
            prefill_rate=self._rates.prefill(rates),
            decode_rate=self._rates.decode(rates),
            fetch_rates=self._rates.fetch(rates) if hit.tokens > hit.device else NO_RATES,
            hit=hit,
        )

    def _cheapest(self, scores: Sequence[Score]) -> int:
        least = min(score.cost for score in scores)
        equal = [index for index, score in enumerate(scores) if score.cost <= least * (1 + TIE)]
        return equal[0] if len(equal) == 1 else self._rng.choice(equal)

    def _lease(self, query: Query, decision: Decision, hit: Hit) -> DispatchLease:
        member = self._members[decision.target_id]
        self._last_lease_id += 1
        lease = DispatchLease(member, self._last_lease_id, decision, hit, query.block_size, self)
        uncached = max(1, query.prompt_tokens - hit.tokens)
        member.books.begin((OWN, lease.lease_id), query.prompt_tokens, uncached, decision.at_s)
        self._untold.note_own(uncached, decision.at_s)
        self._index.speculate(member.target_id, query.keys)
        if dispatched := getattr(self.policy, "dispatched", None):
            dispatched(query, member.target_id)
        if self.observer is not None:
            known = (hit.device - hit.speculative) // query.block_size
            new_keys = tuple(query.keys[known : known + MAX_SHARED_KEYS])
            self.observer.dispatched(
                Dispatch(lease.lease_id, member.target_id, query.prompt_tokens, uncached, new_keys)
            )
        return lease

    def note_answer(self, lease: DispatchLease, cached: CachedTokens | None) -> None:
        """Called by a lease, once at most."""
        if self.observer is not None:
            self.observer.first_output(lease.lease_id)
        if self.on_answered is not None and cached is not None:
            self.on_answered(lease.target_id, lease.hit, cached, lease.block_size)

    def note_release(self, lease: DispatchLease, outcome: Outcome) -> None:
        """Called by a lease, once."""
        self.outcomes[outcome] += 1
        if self.observer is not None:
            self.observer.released(lease.lease_id)

    def note_trip(self, target_id: str) -> None:
        """Called by a lease whose end has opened its target's breaker."""
        self._untold_trips[target_id] += 1

    def take_trips(self) -> Counter[str]:
        """Return how often each target's breaker has opened since the last call; targets may be gone."""
        trips, self._untold_trips = self._untold_trips, Counter()
        return trips

    # What peers dispatched (`RemoteDispatches`)

    def peer_dispatched(self, peer_id: str, dispatch: Dispatch) -> None:
        self._untold.note_peer(peer_id, self.clock())
        member = self._members.get(dispatch.target_id)
        key = (peer_id, dispatch.lease_id)
        if member is None or key in self._peer_claims:
            return
        self._peer_claims[key] = member.books
        member.books.begin(key, dispatch.prompt_tokens, dispatch.uncached_tokens, self.clock())
        self._index.speculate(member.target_id, dispatch.new_keys)

    def peer_first_output(self, peer_id: str, lease_id: int) -> None:
        if books := self._peer_claims.get((peer_id, lease_id)):
            books.answer((peer_id, lease_id))

    def peer_released(self, peer_id: str, lease_id: int) -> None:
        if books := self._peer_claims.pop((peer_id, lease_id), None):
            books.end((peer_id, lease_id))

    def forget_peer(self, peer_id: str) -> None:
        self._untold.forget_peer(peer_id)
        for key in [key for key in self._peer_claims if key[0] == peer_id]:
            self._peer_claims.pop(key).end(key)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not add up. For tests."""
        for one in self._members.values():
            one.books.check_integrity()
