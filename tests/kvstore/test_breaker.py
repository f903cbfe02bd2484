"""The breaker: what opens it, and that one piece at a time finds out whether it may close."""

from __future__ import annotations

import random

import pytest

from kvstore.breaker import FIRST_PAUSE_S, MAX_PAUSE_S, WINDOW, Breaker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock, random.Random(1))


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        assert breaker.admit()
        breaker.failed()


def test_three_failures_in_a_row_open_it(breaker: Breaker) -> None:
    fail(breaker, 2)
    breaker.succeeded()
    fail(breaker, 2)
    assert breaker.state == "closed"
    fail(breaker, 1)
    assert breaker.state == "open"
    assert not breaker.admit()


def test_half_of_the_last_twenty_open_it(breaker: Breaker) -> None:
    for _ in range(WINDOW // 2):
        assert breaker.state == "closed"
        breaker.succeeded()
        breaker.failed()
    assert breaker.state == "open"


def test_one_probe_closes_it(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += FIRST_PAUSE_S
    assert breaker.admit()
    assert breaker.state == "probing"
    assert not breaker.admit()
    breaker.succeeded()
    assert breaker.state == "closed"
    fail(breaker, 2)
    assert breaker.state == "closed"


def test_pauses_grow_while_probes_fail(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    for pause in [1, 2, 4, 8, 16, MAX_PAUSE_S, MAX_PAUSE_S]:
        clock.now += pause / 2 - 0.01  # jitter takes up to half away
        assert not breaker.admit()
        clock.now += pause / 2 + 0.01
        assert breaker.admit()
        breaker.failed()


def test_a_probe_that_tells_nothing_lets_another_one_try(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += FIRST_PAUSE_S
    assert breaker.admit()
    breaker.unknown()
    assert breaker.state == "open"
    assert breaker.admit()
