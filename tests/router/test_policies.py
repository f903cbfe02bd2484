"""Each policy as a function of its candidates."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from engine.errors import ConfigError
from router.policies.prefix import Prefix, PrefixWeights
from router.policies.prefix_approx import PrefixApprox
from router.policies.registry import POLICY_NAMES, make_policy
from router.policies.session import Session
from router.policies.sglang import Sglang
from router.policies.simple import LeastKV, LeastRequests, LeastTokens, PowerOfTwo, RoundRobin
from router.values import Candidate, Hit, Policy, Query


def query(tokens: int = 640, **fields: Any) -> Query:  # noqa: ANN401
    return Query(request_id="r", prompt_tokens=tokens, **fields)


def candidates(count: int = 4, **fields: Sequence[Any]) -> list[Candidate]:
    """`fields` hold one value per candidate."""
    return [
        Candidate(target_id=f"t{number}", **{name: values[number] for name, values in fields.items()})
        for number in range(count)
    ]


def best(policy: Policy, asked: Query, among: Sequence[Candidate]) -> str:
    return min(policy.score(asked, among), key=lambda score: score.cost).target_id


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("count", [1, 2, 64])
def test_every_policy_scores_every_candidate_in_order(name: str, count: int) -> None:
    policy = make_policy(name, lambda: 0.0, random.Random(0))
    assert policy.name == name
    among = candidates(count)
    for asked in (query(), query(session_id="s"), query(1, keys=[bytes(32)])):
        scores = policy.score(asked, among)
        assert [score.target_id for score in scores] == [one.target_id for one in among]
        assert min(score.cost for score in scores) < float("inf")


def test_an_unknown_policy_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError) as caught:
        make_policy("nonsense", lambda: 0.0, random.Random(0))
    assert caught.value.hint is not None
    assert "prefix" in caught.value.hint


def test_round_robin_takes_turns_also_when_some_are_missing() -> None:
    policy = RoundRobin()
    among = candidates(4)
    assert [best(policy, query(), among) for _ in range(5)] == ["t0", "t1", "t2", "t3", "t0"]
    assert [best(policy, query(), [among[0], among[3]]) for _ in range(3)] == ["t3", "t0", "t3"]


def test_power_of_two_takes_the_less_busy_of_two() -> None:
    policy = PowerOfTwo(random.Random(1))
    among = candidates(4, in_flight=[0, 1, 2, 3])
    chosen = Counter(best(policy, query(), among) for _ in range(600))
    assert chosen["t3"] == 0, "it is the busier one in every pair"
    assert chosen["t0"] > chosen["t1"] > chosen["t2"] > 0


def test_least_policies() -> None:
    assert best(LeastRequests(), query(), candidates(3, in_flight=[2, 1, 3])) == "t1"
    assert best(LeastTokens(), query(), candidates(3, queued_uncached_tokens=[9.0, 8.0, 8.0], in_flight=[0, 9, 9])) in (
        "t1",
        "t2",
    )
    among = candidates(3, queued_uncached_tokens=[8.0, 8.0, 9.0], in_flight_tokens=[7000, 6999, 0])
    assert best(LeastTokens(), query(), among) == "t1"
    assert best(LeastKV(), query(), candidates(3, kv_usage=[0.5, 0.3, 0.3], in_flight=[0, 5, 4])) == "t2"


def test_prefix_weighs_a_hit_against_the_queue_before_it() -> None:
    policy = Prefix()
    hits = [Hit(device=576), Hit()]
    for queued, expected in ((0.0, "t0"), (1000.0, "t0"), (1600.0, "t1")):
        among = candidates(2, hit=hits, queued_uncached_tokens=[queued, 0.0], prefill_rate=[1000.0] * 2)
        assert best(policy, query(), among) == expected, f"{queued} tokens before a hit of 576, at a weight of 2.5"


def test_prefix_names_what_a_cost_is_made_of() -> None:
    weights = PrefixWeights(miss=2.0, decode_steps=10.0, kv=0.1)
    (score,) = Prefix(weights).score(
        query(1000),
        [
            Candidate(
                target_id="t",
                hit=Hit(device=300, ram=200),
                queued_uncached_tokens=50.0,
                prefill_rate=100.0,
                decode_tokens=4.0,
                decode_rate=8.0,
                kv_usage=0.5,
                fetch_rates={"ram": 400.0},
            )
        ],
    )
    assert score.reasons == pytest.approx(
        {"queue_s": 0.5, "miss_s": 10.0, "fetch_s": 0.5, "decode_s": 5.0, "kv_s": 0.1}
    )
    assert score.cost == pytest.approx(16.1)


def test_a_slow_tier_costs_no_more_than_computing_again() -> None:
    among = candidates(
        2, hit=[Hit(disk=500), Hit()], prefill_rate=[100.0] * 2, fetch_rates=[{"disk": 0.001}, {"disk": 0.001}]
    )
    with_copy, without = Prefix().score(query(), among)
    assert with_copy.cost == pytest.approx(without.cost)


def test_a_full_target_is_dear_and_not_infinitely_so() -> None:
    half, full = Prefix().score(query(), candidates(2, kv_usage=[0.5, 1.0], prefill_rate=[1e6] * 2))
    assert half.cost < full.cost < 20


def test_one_hot_worker_does_not_switch_affinity_off_for_the_others() -> None:
    """Where a gate looks at the whole pool, t3's queue would send t1's conversation away from its cache."""
    among = candidates(
        4,
        hit=[Hit(), Hit(device=576), Hit(), Hit()],
        in_flight=[1, 1, 1, 500],
        queued_uncached_tokens=[0.0, 0.0, 0.0, 1e6],
        prefill_rate=[1000.0] * 4,
    )
    assert best(Prefix(), query(), among) == "t1"
    assert best(Sglang(), query(), among) != "t1"


def test_sglang_rule() -> None:
    policy = Sglang()
    hits = [Hit(device=128), Hit(device=320), Hit(device=320), Hit()]
    assert best(policy, query(), candidates(4, hit=hits, in_flight=[0, 5, 4, 0])) == "t2", "the longest hit, less busy"
    assert best(policy, query(2000), candidates(4, hit=hits, in_flight=[1, 5, 4, 0])) == "t3", "no hit is long enough"
    assert best(policy, query(), candidates(4, hit=hits, in_flight=[1, 99, 4, 0])) == "t3", "out of balance"


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_prefix_approx_remembers_where_prompts_were_sent() -> None:
    now = 0.0
    policy = PrefixApprox(lambda: now, ttl_s=10.0)
    among = candidates(3, prefill_rate=[1000.0] * 3)
    asked = query(200, keys=keys("a", "b", "c"))
    policy.dispatched(asked, "t1")
    policy.dispatched(query(keys=keys("a")), "t2")
    costs = [score.cost for score in policy.score(asked, among)]
    assert costs[1] < costs[2] < costs[0]
    policy.forget("t1")
    assert best(policy, asked, among) == "t2"
    now = 10.0
    assert len({score.cost for score in policy.score(asked, among)}) == 1, "forgotten after its time"


def test_prefix_approx_keeps_the_beginnings_of_prefixes_longest() -> None:
    policy = PrefixApprox(lambda: 0.0, max_blocks=2)
    policy.dispatched(query(keys=keys("a", "b", "c")), "t1")
    with_a, without = (policy.score(query(keys=keys(first)), candidates(2))[1].cost for first in ("a", "c"))
    assert with_a < without


def test_a_session_stays_until_its_target_is_full_and_moves_alone_when_it_goes() -> None:
    policy = Session()
    among = candidates(8)
    homes = {name: best(policy, query(session_id=name), among) for name in map(str, range(400))}
    assert max(Counter(homes.values()).values()) < 100, "spread over all"
    left = [one for one in among if one.target_id != "t3"]
    for name, home in homes.items():
        moved = best(policy, query(session_id=name), left)
        assert moved == home or home == "t3"
    assert len({best(policy, query(session_id=n), left) for n, home in homes.items() if home == "t3"}) > 3


@pytest.mark.parametrize("seed", range(5))
def test_no_target_of_sessions_exceeds_its_bound(seed: int) -> None:
    """All requests of one session, and none ever ends."""
    policy, rng = Session(1.25), random.Random(seed)
    counts = Counter({f"t{number}": rng.randrange(3) for number in range(6)})
    for _ in range(200):
        among = candidates(6, in_flight=[counts[f"t{number}"] for number in range(6)])
        chosen = best(policy, query(session_id="hot"), among)
        counts[chosen] += 1
        assert counts[chosen] <= math.ceil(1.25 * sum(counts.values()) / 6)
