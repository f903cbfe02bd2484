"""The prefix index at full size: memory, lookups, changes.

    python -m benchmarks.prefix_index [--blocks 10000000] [--targets 64] [--prompt-blocks 200]

Fills an index with different blocks, then looks up prompts of which every target holds a random part. Memory is the
growth of the resident set. Times are of single calls, each for another prompt, so that what it reads is not in
the processor's caches from the call before; the floor beside them is one read of a Python dictionary per block. Exits
with 1 when a bar is missed: 2 GB for 10 million blocks, 300 us at the median for 200 blocks over 64 targets. Needs
psutil.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import psutil

from router.index import PrefixIndex
from router.values import Query

MAX_BYTES_PER_BLOCK = 200.0
MAX_LOOKUP_US = 300.0
PROMPTS = 400
BATCH_BLOCKS = 4


def main() -> int:
    options = _options()
    rng = np.random.default_rng(0)
    process = psutil.Process(os.getpid())
    before_bytes = process.memory_info().rss
    index = PrefixIndex(options.blocks, time.monotonic)
    targets = [f"worker-{number}/0" for number in range(options.targets)]
    prompts = [_keys(rng, options.prompt_blocks) for _ in range(PROMPTS)]
    fill_s = _fill(index, targets, prompts, options.blocks, rng)
    grown = process.memory_info().rss - before_bytes
    print(f"{index.num_blocks:,} blocks over {len(targets)} targets, {index.evicted} evicted, {fill_s:.1f} s to fill")
    print(f"memory: {grown / 1e6:,.0f} MB resident, {index.size_bytes / 1e6:,.0f} MB of it arrays")

    queries = [Query(request_id="r", prompt_tokens=64 * len(keys) + 1, keys=keys) for keys in prompts]
    assert all(len(index.lookup(query)) == len(targets) for query in queries)
    lookup = _times_us([lambda query=query: index.lookup(query) for query in queries * 5])
    held = {key: 1 for keys in prompts for key in keys}
    floor = _times_us([lambda keys=keys: [held.get(key) for key in keys] for keys in prompts])
    unknown = [
        Query(request_id="r", prompt_tokens=12_801, keys=_keys(rng, options.prompt_blocks)) for _ in range(PROMPTS)
    ]
    print(f"lookup of {options.prompt_blocks} blocks: {_show(lookup)}; dictionary reads alone: {_show(floor)}")
    print(f"lookup of a prompt that nobody has: {_show(_times_us([lambda q=q: index.lookup(q) for q in unknown]))}")
    _time_changes(index, targets, rng, prompts)

    bytes_per_block = grown / options.blocks
    missed = bytes_per_block > MAX_BYTES_PER_BLOCK or statistics.median(lookup) > MAX_LOOKUP_US
    print(f"{bytes_per_block:.0f} bytes a block (bar {MAX_BYTES_PER_BLOCK:.0f}); bars {'missed' if missed else 'held'}")
    return int(missed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--targets", type=int, default=64)
    parser.add_argument("--prompt-blocks", type=int, default=200)
    return parser.parse_args()


def _keys(rng: np.random.Generator, count: int) -> list[bytes]:
    joined = rng.bytes(32 * count)
    return [joined[at : at + 32] for at in range(0, len(joined), 32)]


def _fill(
    index: PrefixIndex, targets: Sequence[str], prompts: Sequence[list[bytes]], blocks: int, rng: np.random.Generator
) -> float:
    """Return seconds spent in the index. Every target gets a part of each prompt, and blocks that nobody else has."""
    spent_s = 0.0
    share = (blocks - sum(map(len, prompts))) // len(targets)
    for target in targets:
        own = _keys(rng, share)
        start_s = time.perf_counter()
        index.add_target(target)
        index.replace(target, {"device": own})
        for keys in prompts:
            index.apply(target, stored=keys[: int(rng.integers(1, len(keys) + 1))])
        spent_s += time.perf_counter() - start_s
    return spent_s


def _time_changes(
    index: PrefixIndex, targets: Sequence[str], rng: np.random.Generator, prompts: Sequence[list[bytes]]
) -> None:
    batches = [_keys(rng, BATCH_BLOCKS) for _ in range(PROMPTS)]
    store = [lambda keys=keys: index.apply(targets[0], stored=keys) for keys in batches]
    remove = [lambda keys=keys: index.apply(targets[0], removed=keys) for keys in batches]
    expect = [lambda keys=keys: index.speculate(targets[1], keys) for keys in prompts]
    print(f"{BATCH_BLOCKS} blocks stored: {_show(_times_us(store))}; removed: {_show(_times_us(remove))}")
    print(f"{len(prompts[0])} blocks speculated on: {_show(_times_us(expect))}")
    print(f"a target dropped: {_show(_times_us([lambda: index.drop_target(targets[-1])]))}")


def _times_us(calls: Sequence[Callable[[], object]]) -> list[float]:
    times = []
    for call in calls:
        start_s = time.perf_counter()
        call()
        times.append((time.perf_counter() - start_s) * 1e6)
    return times


def _show(times_us: Sequence[float]) -> str:
    return f"p50 {np.percentile(times_us, 50):.0f} us, p99 {np.percentile(times_us, 99):.0f} us"


if __name__ == "__main__":
    sys.exit(main())
