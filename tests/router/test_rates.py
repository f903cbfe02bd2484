"""Rates from cumulative counters."""

from __future__ import annotations

import pytest

from engine.protocol import EngineLoad
from kvstore.manager.figures import FetchTotal, StoreStats
from router.pool_rates import PoolRates
from router.rates import PRIOR_RATE, Meter, TargetRates


def test_loads_from_tiers_are_measured_from_what_stores_report() -> None:
    def fetched(steps: int, **totals: tuple[int, float]) -> EngineLoad:
        told = {tier: FetchTotal(*total) for tier, total in totals.items()}
        stats = StoreStats(
            tiers=[],
            queues={},
            clients={},
            fetching=0,
            overdue_leases=0,
            fetch_rates={},
            fetched=told,  # type: ignore[arg-type]
        )
        return EngineLoad(steps_total=steps, kv_store=stats)

    rates = TargetRates()
    rates.observe(EngineLoad())
    rates.observe(fetched(1, ram=(1000, 0.1)))
    assert rates.fetch("ram") == pytest.approx(10_000)
    assert rates.fetch("disk") is None
    rates.observe(fetched(2, ram=(1000, 0.1), disk=(500, 0.5)))
    assert rates.fetch("ram") == pytest.approx(10_000)
    assert rates.fetch("disk") == pytest.approx(1000)
    rates.observe(fetched(0))  # another process: its counters begin anew
    rates.observe(fetched(1, disk=(500, 0.5)))
    assert rates.fetch("disk") == pytest.approx(1000)


def load(steps: int, tokens: int, busy_s: float, context: int = 0, decode_s: float = 0.0) -> EngineLoad:
    return EngineLoad(
        steps_total=steps,
        prefill_tokens_total=tokens,
        prefill_busy_s_total=busy_s,
        decode_context_tokens_total=context,
        decode_busy_s_total=decode_s,
    )


def test_a_rate_is_the_quotient_of_differences() -> None:
    rates = TargetRates()
    rates.observe(load(5, 1_000_000, 3.0, 700, 1.0))
    assert rates.prefill is None, "what was before may be hours old"
    rates.observe(load(6, 1_002_000, 3.5, 1700, 1.25))
    assert rates.prefill == pytest.approx(4000)
    assert rates.decode == pytest.approx(4000)


def test_a_new_process_starts_at_zero_and_the_rate_stays() -> None:
    rates = TargetRates()
    rates.observe(load(5, 0, 0.0))
    rates.observe(load(9, 2000, 1.0))
    rates.observe(load(1, 10, 5.0))
    assert rates.prefill == pytest.approx(2000)
    rates.observe(load(2, 2010, 6.0))
    assert rates.prefill == pytest.approx(2000)


def test_small_steps_do_not_make_a_target_look_slow() -> None:
    """A step of a few tokens takes as long as its weights take to read."""
    meter = Meter()
    for _ in range(20):
        meter.add(16, 0.02)
        meter.add(2048, 0.1)
    assert meter.rate == pytest.approx(20_480, rel=0.01)


def test_old_measurements_fade() -> None:
    meter = Meter(half_life_s=1.0)
    for _ in range(100):
        meter.add(1000, 0.1)
    for _ in range(100):
        meter.add(2000, 0.1)
    assert meter.rate == pytest.approx(20_000, rel=0.01)


def test_what_is_not_measured_is_taken_from_the_others() -> None:
    pool, known, unknown = PoolRates(), TargetRates(), TargetRates()
    assert pool.prefill(unknown) == PRIOR_RATE
    assert not pool.is_measured
    known.observe(load(0, 0, 0.0))
    known.observe(load(1, 5000, 1.0))
    pool.note("known", known)
    assert pool.is_measured
    assert pool.prefill(unknown) == pytest.approx(5000)
    unknown.observe_fetch("ram", 900, 0.1)
    fetch = pool.fetch(unknown)
    assert fetch["ram"] == pytest.approx(9000)
    assert fetch["disk"] > fetch["remote"] > 5000
    pool.forget("known")
    assert pool.prefill(unknown) == PRIOR_RATE
