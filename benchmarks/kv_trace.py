"""Hit rates of the store's eviction policies on a recorded trace of prompts.

    python -m benchmarks.kv_trace TRACE [--sizes 1,3,10,30] [--bar 1.0]

TRACE is JSON lines with `hash_ids`, the ids of a prompt's blocks from its start. A tier of each size (percent of the
trace's different blocks) serves every prompt in turn, as the engine would: the leading blocks that it holds are hits,
the last of them used first, and all others are stored. Told is the share of block references that hit, by policy, with
what a tier without bounds would reach. Exit code 1 when the store's default is more than `--bar` points behind the best
policy at a size.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.eviction import POLICIES, Eviction
from kvstore.manager.config import StoreConfig

Prompts = Sequence[Sequence[int]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=Path)
    parser.add_argument("--sizes", default="1,3,10,30")
    parser.add_argument("--bar", type=float, default=1.0)
    arguments = parser.parse_args()
    with arguments.trace.open() as lines:
        prompts = [json.loads(line)["hash_ids"] for line in lines]
    blocks, references = len({block for prompt in prompts for block in prompt}), sum(map(len, prompts))
    print(
        f"{len(prompts)} prompts, {references} blocks, {blocks} different; without bounds {_rate(prompts, None):.1f} %"
    )
    sizes = [float(size) for size in arguments.sizes.split(",")]
    kept = [_compare(prompts, size, blocks, arguments.bar) for size in sizes]
    sys.exit(int(not all(kept)))


def _compare(prompts: Prompts, size: float, blocks: int, bar: float) -> bool:
    """Print one size's line; return whether the default keeps up with the best."""
    capacity = max(1, int(blocks * size / 100))
    rates = {name: _rate(prompts, capacity, policy) for name, policy in POLICIES.items()}
    default, best = rates[StoreConfig().eviction], max(rates.values())
    kept = default >= best - bar
    told = ", ".join(f"{name} {rate:.2f} %" for name, rate in rates.items())
    print(f"{size:5g} %: {told}; {StoreConfig().eviction} {'keeps up' if kept else 'DOES NOT KEEP UP'}", flush=True)
    return kept


def _rate(prompts: Prompts, capacity: int | None, policy: Callable[[], Eviction[int]] = POLICIES["lru"]) -> float:
    """Return the percentage of references that hit in a tier of `capacity` blocks, None for all."""
    order, held = policy(), set[int]()
    hits = references = 0
    for prompt in prompts:
        references += len(prompt)
        leading = next((index for index, block in enumerate(prompt) if block not in held), len(prompt))
        hits += leading
        # As the tiers are told: what a prefix needs for longer is used last.
        for block in reversed(prompt[:leading]):
            order.use(block)
        for block in prompt[leading:]:
            if block in held:
                order.use(block)
                continue
            if capacity is not None and len(held) >= capacity:
                victim = order.candidate(lambda _: True)
                assert victim is not None, "everything may go"
                order.remove(victim, evicted=True)
                held.remove(victim)
            order.add(block)
            held.add(block)
    return 100 * hits / references


if __name__ == "__main__":
    main()
