"""Decisions of a dispatcher: who is eligible, what is told of it, what peers and breakers change."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from engine.protocol import CachedTokens, EngineLoad
from router.decision import KEPT_CANDIDATES, DecisionLog
from router.dispatcher import Dispatcher
from router.dispatches import Dispatch
from router.index import PrefixIndex
from router.member import DispatchLease
from router.policies.registry import POLICY_NAMES, make_policy
from router.values import Hit, Query

KEYS = [bytes([number]) * 32 for number in range(40)]


class World:
    """A dispatcher, its index and its clock."""

    def __init__(self, count: int = 4, policy: str = "prefix") -> None:
        self.now_s = 0.0
        self.index = PrefixIndex(4096, self.clock)
        rng = random.Random(5)
        self.dispatcher = Dispatcher(make_policy(policy, self.clock, rng), self.index, self.clock, rng)
        for number in range(count):
            self.dispatcher.add_target(f"t{number}")

    def clock(self) -> float:
        return self.now_s

    def choose(self, blocks: int = 10, **fields: Any) -> DispatchLease:  # noqa: ANN401
        lease = self.dispatcher.choose(ask(blocks), **fields)
        assert lease is not None
        return lease


def ask(blocks: int = 10, request_id: str = "r") -> Query:
    return Query(request_id=request_id, prompt_tokens=64 * blocks + 5, keys=KEYS[:blocks])


def random_store(rng: random.Random) -> dict[str, Any]:
    def total() -> dict[str, Any]:
        seconds = rng.choice((0.0, 1e-300, 1.0, rng.random() * 1e11))
        return {"tokens": rng.choice((0, 1, rng.randrange(2**53))), "seconds": seconds}

    fetched = {tier: total() for tier in ("ram", "disk", "remote") if rng.random() < 0.5}
    empty = {"tiers": [], "queues": {}, "clients": {}, "fetching": 0, "overdue_leases": 0, "fetch_rates": {}}
    return {**empty, "fetched": fetched}


def random_load(rng: random.Random) -> EngineLoad:
    """Return any load that passes the wire."""
    fields: dict[str, Any] = {"requests_total": {}, "draining": False}
    for name in EngineLoad.__struct_fields__:
        if name.endswith("_s_total"):
            fields[name] = rng.choice((0.0, 1e-300, 1.0, rng.random() * 1e11))
        elif name == "kv_store":
            fields[name] = rng.choice((None, random_store(rng)))
        elif name not in fields:
            fields[name] = rng.choice((0, 1, rng.randrange(1000), rng.randrange(2**53)))
    return msgspec.convert(fields, EngineLoad)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_whatever_engines_report_of_themselves_a_target_is_found(policy: str) -> None:
    world, rng = World(policy=policy), random.Random(6)
    leases: list[DispatchLease] = []
    for _ in range(400):
        world.now_s += rng.choice((0.0, 0.001, 1.0, 100.0))
        world.dispatcher.report_load(f"t{rng.randrange(4)}", random_load(rng))
        leases.append(world.choose(rng.choice((0, 10))))
        assert all(not math.isnan(option.score.cost) for option in leases[-1].decision.options)
        assert all(math.isfinite(part) for part in world.dispatcher.backlog() if part is not None)
        if rng.random() < 0.5:
            leases.pop(rng.randrange(len(leases))).first_output(CachedTokens(rng.randrange(2**50)))


def test_a_prompt_goes_where_its_prefix_is_and_the_decision_says_so() -> None:
    world = World()
    world.index.apply("t2", stored=KEYS[:8])
    lease = world.choose()
    assert lease.target_id == "t2"
    decision = lease.decision
    assert (decision.predicted_tokens, decision.prompt_tokens, decision.policy) == (512, 645, "prefix")
    assert decision.num_candidates == 4
    assert decision.options[0].candidate.hit == Hit(device=512)
    assert all("miss_s" in option.score.reasons for option in decision.options)


def test_of_many_candidates_the_cheapest_are_kept_the_chosen_one_first() -> None:
    world = World(64)
    decision = world.choose().decision
    assert decision.num_candidates == 64
    assert len(decision.options) == KEPT_CANDIDATES
    assert decision.options[0].candidate.target_id == decision.target_id


def test_equal_costs_are_drawn_by_lot() -> None:
    world = World()
    chosen = Counter(world.choose(0).target_id for _ in range(1))
    for number in range(39):
        lease = world.choose(0)
        chosen[lease.target_id] += 1
        lease.release("ok")
        world.now_s = number + 3.0
    assert len(chosen) == 4


def test_why_a_target_was_passed_over() -> None:
    world = World(5)
    world.dispatcher.set_state("t0", "draining")
    for _ in range(3):
        world.choose(exclude=["t2", "t3", "t4"]).release("fault")
    full = EngineLoad(kv_blocks_used=96, kv_blocks_total=100)
    world.dispatcher.report_load("t4", full)
    decision = world.choose(exclude=["t2"]).decision
    assert decision.passed_over == {"t0": "draining", "t1": "breaker open", "t2": "excluded", "t4": "full"}
    assert decision.target_id == "t3"


def test_when_all_are_full_one_of_them_takes_it() -> None:
    world = World(2)
    for name in ("t0", "t1"):
        world.dispatcher.report_load(name, EngineLoad(kv_blocks_used=99, kv_blocks_total=100))
    assert world.choose().decision.passed_over == {}


def test_when_all_breakers_are_open_they_are_ignored() -> None:
    world = World(2)
    for other in ("t1", "t0"):
        for _ in range(3):
            world.choose(exclude=[other]).release("fault")
    decision = world.choose().decision
    assert decision.fail_open
    assert decision.num_candidates == 2


def test_nothing_is_chosen_where_nothing_is_ready() -> None:
    world = World(2)
    world.dispatcher.set_state("t0", "dead")
    assert world.dispatcher.choose(ask(), exclude=["t1"]) is None
    assert world.dispatcher.choose(ask(), unreachable=["t1"]) is None
    assert world.dispatcher.in_flight == {"t0": 0, "t1": 0}


def test_a_probe_is_sent_alone_and_its_answer_closes_the_breaker() -> None:
    world = World(1)
    for _ in range(3):
        world.choose().release("fault")
    world.now_s = 5.0
    probe = world.choose()
    assert not probe.decision.fail_open
    assert world.choose().decision.fail_open, "the only target is used all the same"
    probe.first_output(CachedTokens())
    assert world.dispatcher.status()[0].breaker == "closed"


def test_another_process_of_the_same_name_starts_without_the_past_of_the_old_one() -> None:
    world = World(1)
    world.index.apply("t0", stored=KEYS)
    old = world.choose()
    for _ in range(3):
        world.choose().release("fault")
    world.dispatcher.renew_target("t0")
    assert world.dispatcher.in_flight == {"t0": 0}
    lease = world.choose()
    assert not lease.decision.fail_open
    assert lease.decision.predicted_tokens == 0
    old.release("fault")
    assert world.dispatcher.in_flight == {"t0": 1}


def test_choices_of_one_prompt_follow_each_other_before_any_event_came() -> None:
    world = World(8)
    first = world.choose(30)
    assert {world.choose(30).target_id for _ in range(3)} == {first.target_id}


def test_what_peers_dispatched_counts_until_they_say_otherwise_or_are_gone() -> None:
    world = World(2)
    for lease_id in range(1, 4):
        world.dispatcher.peer_dispatched("p", Dispatch(lease_id, "t0", 1000, 900, tuple(KEYS[:3])))
    world.dispatcher.peer_dispatched("p", Dispatch(3, "t0", 1000, 900))
    assert world.dispatcher.in_flight == {"t0": 3, "t1": 0}
    assert world.index.lookup(ask())["t0"].speculative == 192
    assert world.dispatcher.status()[0].queued_uncached_tokens == 2700
    world.dispatcher.peer_first_output("p", 1)
    assert world.dispatcher.status()[0].queued_uncached_tokens == 1800
    world.dispatcher.peer_released("p", 1)
    assert world.dispatcher.in_flight == {"t0": 2, "t1": 0}
    world.dispatcher.forget_peer("p")
    assert world.dispatcher.in_flight == {"t0": 0, "t1": 0}


def test_peers_are_told_what_a_target_will_hold_anew() -> None:
    class Told:
        def __init__(self) -> None:
            self.dispatches: list[Dispatch] = []

        def dispatched(self, dispatch: Dispatch) -> None:
            self.dispatches.append(dispatch)

        def first_output(self, lease_id: int) -> None: ...

        def released(self, lease_id: int) -> None: ...

    world, told = World(1), Told()
    world.dispatcher.observer = told
    world.index.apply("t0", stored=KEYS[:4])
    world.choose(6)
    assert told.dispatches == [Dispatch(1, "t0", 389, 133, tuple(KEYS[4:6]))]


def test_predictions_are_handed_on_with_what_came_of_them() -> None:
    world = World(1)
    seen: list[object] = []
    world.dispatcher.on_answered = lambda *answer: seen.append(answer)
    world.index.apply("t0", stored=KEYS[:4])
    lease = world.choose(6)
    lease.first_output(CachedTokens(device=192))
    lease.first_output(CachedTokens(device=192))
    lease.release("ok")
    lease.first_output(CachedTokens(device=192))
    world.choose(6).first_output(None)
    assert seen == [("t0", Hit(device=256), CachedTokens(device=192), 64)]


def test_the_log_keeps_the_last_decisions_and_finds_them_by_request() -> None:
    world, log = World(), DecisionLog(3)
    for name in ("a", "b-0", "b-1", "b-0"):
        lease = world.dispatcher.choose(ask(request_id=name))
        assert lease is not None
        log.add(lease.decision)
    assert len(log) == 3
    assert log.find("a") == []
    assert [decision.request_id for decision in log.find("b")] == ["b-0", "b-0", "b-1"]
    assert [decision.request_id for decision in log.find("b-1")] == ["b-1"]
