"""What is taken to be dispatched by peers that have not told it yet: nothing, unless they dispatch at the same time."""

from __future__ import annotations

import pytest

from router.untold import MOST_REQUESTS, WINDOW_S, Untold

TARGETS = ["t2", "t0", "t1"]


def gateway(own_id: str, *, decisions: int, told_later_s: float, peers: int = 1) -> Untold:
    """Every decision is about 100 tokens, and each of two peers tells of so many dispatches somewhat later."""
    untold, now_s = Untold(), 0.0
    untold.own_id = own_id
    for _ in range(decisions):
        now_s += 1.0
        untold.note_own(100, now_s)
        for peer_id in {"a", "b", "c"} - {own_id}:
            for _ in range(peers):
                untold.note_peer(peer_id, now_s + told_later_s)
    return untold


def test_a_gateway_alone_expects_nothing() -> None:
    untold = Untold()
    untold.own_id = "a"
    untold.note_own(100, 1.0)
    assert untold.expected_tokens(TARGETS) is None


def test_what_comes_one_at_a_time_is_expected_nowhere() -> None:
    assert gateway("a", decisions=100, told_later_s=0.5).expected_tokens(TARGETS) is None


def test_each_of_three_gateways_has_a_home_of_its_own_in_a_burst() -> None:
    homes = set()
    for own_id in ("a", "b", "c"):
        expected = gateway(own_id, decisions=1000, told_later_s=WINDOW_S / 2).expected_tokens(TARGETS)
        assert expected is not None
        # Two requests that it does not know of, on the two targets that are others' homes.
        assert sorted(expected) == [0.0, pytest.approx(100, rel=0.02), pytest.approx(100, rel=0.02)]
        homes.add(TARGETS[expected.index(0.0)])
    assert homes == set(TARGETS)


def test_what_a_joining_peer_tells_at_once_is_no_burst_without_end() -> None:
    untold = gateway("a", decisions=1, told_later_s=0.0, peers=1000)
    expected = untold.expected_tokens(TARGETS)
    assert expected is not None
    assert max(expected) == MOST_REQUESTS * 100


def test_peers_that_are_gone_are_expected_to_do_nothing() -> None:
    untold = gateway("a", decisions=10, told_later_s=0.0)
    untold.forget_peer("b")
    assert untold.expected_tokens(TARGETS) is not None
    untold.forget_peer("c")
    assert untold.expected_tokens(TARGETS) is None
