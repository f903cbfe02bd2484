"""The dispatcher's books under any order of events: they end where they began."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.protocol import CachedTokens, EngineLoad, Outcome
from router.dispatcher import Dispatcher
from router.dispatches import Dispatch
from router.in_flight import TargetBooks
from router.index import PrefixIndex
from router.member import DispatchLease
from router.policies.registry import POLICY_NAMES, make_policy
from router.values import Query, TargetState

TARGETS = ("a/0", "b/0", "c/0")
PEERS = ("peer-1", "peer-2")
OUTCOMES: Sequence[Outcome] = ("ok", "client_error", "pressure", "fault", "cancelled")
STATES: Sequence[TargetState] = ("starting", "ready", "draining", "dead")


class Books(RuleBasedStateMachine):
    """Leases of this process and of peers, reports, and targets that come and go."""

    leases: Bundle[Any] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        rng = random.Random(0)
        clock = self.clock
        index = PrefixIndex(4096, clock)
        self.dispatcher = Dispatcher(make_policy("prefix", clock, rng), index, clock, rng)
        self.open: list[DispatchLease] = []
        self.peer_leases: set[tuple[str, int]] = set()
        self.told: list[tuple[str, int]] = []
        self.dispatcher.observer = self
        for target_id in TARGETS:
            self.dispatcher.add_target(target_id)

    def clock(self) -> float:
        return self.now_s

    # What peers are told.

    def dispatched(self, dispatch: Dispatch) -> None:
        self.told.append(("dispatched", dispatch.lease_id))

    def first_output(self, lease_id: int) -> None:
        self.told.append(("first_output", lease_id))

    def released(self, lease_id: int) -> None:
        self.told.append(("released", lease_id))

    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(target=leases, tokens=st.integers(1, 1000), exclude=st.sets(st.sampled_from(TARGETS)), head=st.integers(0, 2))
    def choose(self, tokens: int, exclude: set[str], head: int) -> DispatchLease | None:
        keys = [bytes([head, number]) * 16 for number in range(tokens // 64)]
        query = Query(request_id=f"r{tokens}", prompt_tokens=tokens, keys=keys)
        lease = self.dispatcher.choose(query, exclude)
        if lease is None:
            ready = {one.target_id for one in self.dispatcher.status() if one.state == "ready"}
            assert ready <= exclude, "what is ready and wanted is always found, also behind open breakers"
        else:
            assert lease.target_id not in exclude
            self.open.append(lease)
        return lease

    @rule(lease=leases, cached=st.one_of(st.none(), st.integers(0, 1000)))
    def answer(self, lease: DispatchLease | None, cached: int | None) -> None:
        if lease is not None:
            lease.first_output(None if cached is None else CachedTokens(device=cached))

    @rule(lease=consumes(leases), outcome=st.sampled_from(OUTCOMES), times=st.integers(1, 3))
    def release(self, lease: DispatchLease | None, outcome: Outcome, times: int) -> None:
        if lease is not None:
            for _ in range(times):
                lease.release(outcome)
            self.open.remove(lease)

    @rule(peer=st.sampled_from(PEERS), lease_id=st.integers(1, 5), name=st.sampled_from((*TARGETS, "unknown/0")))
    def peer_dispatches(self, peer: str, lease_id: int, name: str) -> None:
        self.dispatcher.peer_dispatched(peer, Dispatch(lease_id, name, 300, 200))

    @rule(peer=st.sampled_from(PEERS), lease_id=st.integers(1, 5))
    def peer_answered(self, peer: str, lease_id: int) -> None:
        self.dispatcher.peer_first_output(peer, lease_id)

    @rule(peer=st.sampled_from(PEERS), lease_id=st.integers(1, 5))
    def peer_releases(self, peer: str, lease_id: int) -> None:
        self.dispatcher.peer_released(peer, lease_id)

    @rule(peer=st.sampled_from(PEERS))
    def peer_goes(self, peer: str) -> None:
        self.dispatcher.forget_peer(peer)

    @rule(name=st.sampled_from(TARGETS), queued=st.integers(0, 5000), used=st.integers(0, 10), steps=st.integers(0, 9))
    def report(self, name: str, queued: int, used: int, steps: int) -> None:
        load = EngineLoad(
            queued_uncached_tokens=queued,
            kv_blocks_used=used,
            kv_blocks_total=10,
            steps_total=steps,
            prefill_tokens_total=100 * steps,
            prefill_busy_s_total=0.1 * steps,
        )
        self.dispatcher.report_load(name, load)

    @rule(name=st.sampled_from(TARGETS), state=st.sampled_from(STATES))
    def change_state(self, name: str, state: TargetState) -> None:
        self.dispatcher.set_state(name, state)

    @rule(name=st.sampled_from(TARGETS))
    def renew(self, name: str) -> None:
        self.dispatcher.renew_target(name)

    @rule(name=st.sampled_from(TARGETS))
    def remove(self, name: str) -> None:
        self.dispatcher.remove_target(name)

    @invariant()
    def the_books_add_up(self) -> None:
        self.dispatcher.check_integrity()
        for one in self.dispatcher.status():
            assert one.in_flight >= 0
            assert one.queued_uncached_tokens >= 0
        tokens, rate = self.dispatcher.backlog()
        assert tokens >= 0
        assert rate is None or rate >= 0

    def teardown(self) -> None:
        for lease in self.open:
            lease.release("cancelled")
        for peer in PEERS:
            self.dispatcher.forget_peer(peer)
        self.dispatcher.check_integrity()
        assert set(self.dispatcher.in_flight.values()) <= {0}
        begun = [number for what, number in self.told if what == "dispatched"]
        assert sorted(begun) == sorted(number for what, number in self.told if what == "released")
        assert sum(self.dispatcher.outcomes.values()) == len(begun)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_claim_is_counted_beside_a_report_until_a_report_must_include_it() -> None:
    books = TargetBooks(settle_s=0.05, stale_s=2.0)
    books.begin(("", 1), 100, 80, now_s=0.0)
    assert books.queued_uncached_tokens(0.0) == 80
    books.report(EngineLoad(queued_uncached_tokens=500), 0.01)
    assert books.queued_uncached_tokens(0.01) == 580, "it may still be on its way"
    books.report(EngineLoad(queued_uncached_tokens=560), 0.06)
    assert books.queued_uncached_tokens(0.06) == 560
    books.answer(("", 1))
    assert books.queued_uncached_tokens(1.0) == 560, "the next report will tell"
    assert books.queued_uncached_tokens(2.1) == 0, "an old report is not believed"


def test_drift_is_what_the_engine_has_beyond_the_claims() -> None:
    books = TargetBooks()
    assert books.drift(0.0) is None
    books.begin(("", 1), 100, 80, now_s=0.0)
    books.report(EngineLoad(running=1, waiting=2), 1.0)
    assert books.drift(1.0) == 2
    books.begin(("", 2), 100, 80, now_s=1.0)
    assert books.drift(1.0) == 2, "what the report cannot know yet is left out"


def test_kv_usage_counts_what_is_on_its_way() -> None:
    books = TargetBooks()
    assert books.view(640, 64, 0.0) == (0, 0, 0.0)
    books.begin(("", 1), 640, 128, now_s=0.0)
    assert books.view(640, 64, 0.0) == (128, 0, 0.0)
    books.answer(("", 1))
    assert books.view(640, 64, 0.0) == (0, 640, 0.0), "without a report: the prompts of those that were answered"
    books.begin(("", 2), 640, 128, now_s=0.0)
    books.report(EngineLoad(kv_blocks_used=50, kv_blocks_total=100, running_context_tokens=9), 0.0)
    assert books.view(640, 64, 0.0) == (128, 9, 0.62)
    assert books.view(10**9, 64, 0.0)[2] == 1.0


def test_every_policy_keeps_its_books_through_faults_and_removals() -> None:
    for name in POLICY_NAMES:
        rng = random.Random(3)
        dispatcher = Dispatcher(make_policy(name, lambda: 0.0, rng), PrefixIndex(4096, lambda: 0.0), lambda: 0.0, rng)
        for target_id in TARGETS:
            dispatcher.add_target(target_id)
        keys = [bytes([number]) * 32 for number in range(10)]
        leases = [
            dispatcher.choose(Query(request_id=f"r{number}", prompt_tokens=650, keys=keys, session_id="s"))
            for number in range(20)
        ]
        dispatcher.remove_target("b/0")
        for lease in leases:
            assert lease is not None
            lease.release(rng.choice(OUTCOMES))
        assert dispatcher.in_flight == {"a/0": 0, "c/0": 0}
