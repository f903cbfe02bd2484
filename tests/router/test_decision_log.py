"""The last decisions by request, and those of one request that somebody follows."""

from __future__ import annotations

import gc

from router.decision import Decision, DecisionLog


def decision(request_id: str, at_s: float = 0.0) -> Decision:
    return Decision(
        request_id=request_id,
        policy="random",
        target_id="w/0",
        at_s=at_s,
        prompt_tokens=1,
        predicted_tokens=0,
        num_candidates=1,
        options=(),
    )


def test_the_last_decisions_are_found_with_those_of_all_choices() -> None:
    log = DecisionLog(capacity=4)
    for name in ("a", "b-0", "b-1", "bc", "b-0"):
        log.add(decision(name))
    assert [one.request_id for one in log.find("b")] == ["b-0", "b-0", "b-1"]
    assert log.find("a") == [], "the oldest is forgotten"
    assert len(log) == 4


def test_who_follows_a_request_misses_nothing_however_many_others_there_are() -> None:
    log = DecisionLog(capacity=2)
    log.add(decision("a", 0.0))
    trail, other = log.follow("a"), log.follow("never")
    for at_s in (1.0, 2.0):
        log.add(decision("a", at_s))
        for _ in range(10):
            log.add(decision("b"))
    assert log.find("a") == []
    assert [one.at_s for one in trail] == [1.0, 2.0]
    assert log.follow("a") is trail
    assert other == []
    del trail
    gc.collect()
    assert log.follow("a") == [], "what nobody holds is not kept"
