"""When a target is passed over, and how it comes back."""

from __future__ import annotations

import pytest

from engine.protocol import Outcome
from router.breaker import Breaker


def fault(breaker: Breaker, now_s: float, times: int = 1) -> None:
    for _ in range(times):
        breaker.end("fault", now_s, is_probe=False)


def test_three_faults_within_ten_seconds_open_it() -> None:
    breaker = Breaker()
    fault(breaker, 0.0)
    fault(breaker, 9.0)
    assert breaker.allows(9.0)
    fault(breaker, 10.5)
    assert breaker.allows(10.5), "the first is too old"
    fault(breaker, 11.0)
    assert not breaker.allows(11.0)
    assert breaker.trips == 1


@pytest.mark.parametrize("outcome", ["ok", "client_error", "pressure", "cancelled"])
def test_nothing_but_faults_counts(outcome: Outcome) -> None:
    breaker = Breaker()
    for _ in range(100):
        breaker.end(outcome, 0.0, is_probe=False)
    assert breaker.state(0.0) == "closed"


def test_one_probe_at_a_time_closes_it() -> None:
    breaker = Breaker()
    fault(breaker, 0.0, 3)
    assert breaker.state(4.9) == "open"
    assert not breaker.begin(4.9), "what is sent to an open one, when all are open, is no probe"
    assert breaker.state(5.0) == "half_open"
    assert breaker.begin(5.0)
    assert not breaker.allows(5.0)
    breaker.end("ok", 6.0, is_probe=True)
    assert breaker.state(6.0) == "closed"


def test_a_probe_that_has_answered_is_one_no_more() -> None:
    breaker = Breaker()
    fault(breaker, 0.0, 3)
    assert breaker.begin(5.0)
    breaker.probe_answered()
    assert breaker.state(5.0) == "closed"
    breaker.end("fault", 6.0, is_probe=False)
    assert breaker.state(6.0) == "closed"


@pytest.mark.parametrize("outcome", ["client_error", "pressure", "cancelled"])
def test_a_probe_that_proves_nothing_makes_way_for_another(outcome: Outcome) -> None:
    breaker = Breaker()
    fault(breaker, 0.0, 3)
    assert breaker.begin(5.0)
    breaker.end(outcome, 5.0, is_probe=True)
    assert breaker.state(5.0) == "half_open"
    assert breaker.allows(5.0)


def test_failed_probes_double_the_pause_up_to_a_minute_and_success_resets_it() -> None:
    breaker, now_s, pauses = Breaker(), 0.0, []
    fault(breaker, now_s, 3)
    for _ in range(6):
        begun_s = now_s
        while not breaker.allows(now_s):
            now_s += 0.5
        pauses.append(now_s - begun_s)
        assert breaker.begin(now_s)
        breaker.end("fault", now_s, is_probe=True)
    assert pauses == [5, 10, 20, 40, 60, 60]
    now_s += 60
    assert breaker.begin(now_s)
    breaker.end("ok", now_s, is_probe=True)
    fault(breaker, now_s, 3)
    assert breaker.state(now_s + 4.9) == "open"
    assert breaker.state(now_s + 5.0) == "half_open"


def test_requests_that_were_under_way_when_it_opened_do_not_prolong_it() -> None:
    """The death of a worker is seen by all of its requests."""
    breaker = Breaker()
    fault(breaker, 0.0, 64)
    assert breaker.trips == 1
    assert breaker.state(5.0) == "half_open"
