"""Predictions against what was cached: single misses are noise, a run of them is a suspicion."""

from __future__ import annotations

from router.decision import Answered
from router.hit_check import MAX_MISSES, WINDOW_REQUESTS, HitCheck

SIZE = 16


def checked() -> tuple[HitCheck, list[str]]:
    suspects: list[str] = []
    return HitCheck(suspects.append), suspects


def answered(target: str, predicted_blocks: int, cached_blocks: int = 0, speculative_blocks: int = 0) -> Answered:
    return Answered(
        request_id="r",
        target_id=target,
        prompt_tokens=20 * SIZE,
        predicted_tokens=predicted_blocks * SIZE,
        speculative_tokens=speculative_blocks * SIZE,
        cached_tokens=cached_blocks * SIZE,
    )


def test_a_run_of_misses_is_a_suspicion_once() -> None:
    check, suspects = checked()
    for _ in range(2 * MAX_MISSES - 1):
        check.observe(answered("t", 10), SIZE)
    assert suspects == ["t"]
    assert check.counters["misses"] == 2 * MAX_MISSES - 1
    assert check.counters["overestimated_tokens"] == 10 * SIZE * (2 * MAX_MISSES - 1)


def test_misses_that_are_far_between_are_noise() -> None:
    check, suspects = checked()
    for number in range(10 * WINDOW_REQUESTS):
        missed = number % (WINDOW_REQUESTS // (MAX_MISSES - 1)) == 0
        check.observe(answered("t", 10, 0 if missed else 10), SIZE)
    assert suspects == []


def test_small_errors_speculation_and_hits_beyond_the_prediction_are_no_misses() -> None:
    check, suspects = checked()
    for _ in range(50):
        check.observe(answered("t", 4, 2), SIZE)
        check.observe(answered("t", 10, 0, speculative_blocks=9), SIZE)
        check.observe(answered("t", 0, 5), SIZE)
    assert suspects == []
    assert check.counters["underestimated_tokens"] == 250 * SIZE


def test_targets_are_counted_apart_and_forgotten() -> None:
    check, suspects = checked()
    for _ in range(MAX_MISSES - 1):
        for target in "ab":
            check.observe(answered(target, 10), SIZE)
    check.forget("a")
    check.observe(answered("a", 10), SIZE)
    assert suspects == []
    check.observe(answered("b", 10), SIZE)
    assert suspects == ["b"]
