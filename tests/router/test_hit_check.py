"""Predictions against what was cached: single misses are noise, a run of them is a suspicion."""

from __future__ import annotations

from engine.protocol import CachedTokens
from router.hit_check import MAX_MISSES, WINDOW_REQUESTS, HitCheck
from router.values import Hit

SIZE = 16


def checked() -> tuple[HitCheck, list[str]]:
    suspects: list[str] = []
    return HitCheck(suspects.append), suspects


def test_a_run_of_misses_is_a_suspicion_once() -> None:
    check, suspects = checked()
    for _ in range(2 * MAX_MISSES - 1):
        check.observe("t", Hit(device=10 * SIZE), CachedTokens(), SIZE)
    assert suspects == ["t"]
    assert check.counters["misses"] == 2 * MAX_MISSES - 1
    assert check.counters["overestimated_tokens"] == 10 * SIZE * (2 * MAX_MISSES - 1)


def test_misses_that_are_far_between_are_noise() -> None:
    check, suspects = checked()
    for number in range(10 * WINDOW_REQUESTS):
        missed = number % (WINDOW_REQUESTS // (MAX_MISSES - 1)) == 0
        check.observe("t", Hit(device=10 * SIZE), CachedTokens(device=0 if missed else 10 * SIZE), SIZE)
    assert suspects == []


def test_small_errors_speculation_and_hits_beyond_the_prediction_are_no_misses() -> None:
    check, suspects = checked()
    for _ in range(50):
        check.observe("t", Hit(device=4 * SIZE), CachedTokens(device=2 * SIZE), SIZE)
        check.observe("t", Hit(device=10 * SIZE, speculative=9 * SIZE), CachedTokens(), SIZE)
        check.observe("t", Hit(), CachedTokens(ram=5 * SIZE), SIZE)
    assert suspects == []
    assert check.counters["underestimated_tokens"] == 250 * SIZE


def test_targets_are_counted_apart_and_forgotten() -> None:
    check, suspects = checked()
    for _ in range(MAX_MISSES - 1):
        for target in "ab":
            check.observe(target, Hit(device=10 * SIZE), CachedTokens(), SIZE)
    check.forget("a")
    check.observe("a", Hit(device=10 * SIZE), CachedTokens(), SIZE)
    assert suspects == []
    check.observe("b", Hit(device=10 * SIZE), CachedTokens(), SIZE)
    assert suspects == ["b"]
