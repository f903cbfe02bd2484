"""What is loaded because it pays, and what is loaded to learn whether it does."""

from __future__ import annotations

from kvstore.manager.cost import PROBE_AFTER_S, PROBE_BLOCKS, FetchCost
from kvstore.tier import TierName

BLOCK_BYTES = 8 << 20
BLOCK_TOKENS = 64


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def cost_of(clock: Clock, prefill_rate: int, **rates: float) -> FetchCost:
    """Return the cost where each tier was measured once, and then long ago."""
    cost = FetchCost(clock)
    cost.observe_prefill(prefill_rate, 1.0)
    for tier in ("ram", "disk", "remote"):
        if tier in rates:
            cost.observe(tier, int(rates[tier]), 1.0)
    return cost


def worth(cost: FetchCost, *tiers: TierName) -> int:
    return cost.worthwhile(tiers, BLOCK_BYTES, BLOCK_TOKENS)


def test_a_prefix_ends_where_most_time_is_saved() -> None:
    # A block takes 6.4 ms to compute, 0.8 ms from memory, 80 ms from the disk.
    cost = cost_of(Clock(), 10_000, ram=1e10, disk=1e8)
    assert worth(cost, "ram", "ram", "disk", "disk") == 2
    assert worth(cost, "ram", "ram", "disk", *["ram"] * 30) == 33


def test_a_tier_that_was_never_measured_is_tried_once() -> None:
    clock = Clock()
    cost = cost_of(clock, 10**6, ram=1e9)
    assert worth(cost, *["disk"] * 100) == PROBE_BLOCKS
    assert worth(cost, *["disk"] * 100) == 0
    cost.observe("disk", 10**12, 1.0)
    assert worth(cost, *["disk"] * 100) == 100, "it has turned out to be fast"


def test_what_does_not_pay_is_tried_again_for_a_thousandth_of_the_time() -> None:
    clock = Clock()
    cost = cost_of(clock, 10**6, ram=1e9)
    clock.now_s += PROBE_AFTER_S - 1
    assert worth(cost, *["ram"] * 8) == 0
    clock.now_s += 1
    assert worth(cost, *["ram"] * 8) == 8
    lost_s = 8 * BLOCK_BYTES / 1e9
    clock.now_s += 1000 * lost_s - 1
    assert worth(cost, *["ram"] * 8) == 0
    clock.now_s += 1.5
    assert worth(cost, *["ram"] * 8) == 8


def test_a_tier_that_has_become_fast_is_found_out() -> None:
    clock = Clock()
    cost = cost_of(clock, 10**6, ram=1e9)
    assert worth(cost, *["ram"] * 8) == 0
    while not cost.rates["ram"] > 9e11:
        clock.now_s += 600
        assert worth(cost, *["ram"] * 8) == 8
        cost.observe("ram", 10**12, 1.0)
    assert worth(cost, *["ram"] * 8) == 8


def test_saves_tell_how_fast_memory_is_until_a_load_does() -> None:
    cost = cost_of(Clock(), 100_000)
    cost.observe_save(3 << 30, 0.1)
    cost.observe_save(1 << 20, 1.0)
    assert worth(cost, *["ram"] * 8) == 8
    cost.observe("ram", 10**9, 1.0)
    assert cost.rates["ram"] == 1e9
    cost.observe_save(3 << 30, 0.1)
    assert cost.rates["ram"] == 1e9
