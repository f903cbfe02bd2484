"""What one routing decision costs: CPU time of the dispatcher alone, and of what the pool does around it.

    python -m benchmarks.router_decision [--targets 64] [--blocks 200] [--decisions 2000] [--policies prefix,...]

Prompts have `--blocks` blocks of 64 tokens, half of them cached on some targets. A decision is: look the prompt up in
the index, score all targets, lease one, note what is expected there, and later its first output and its end. The keys
of a prompt (SHA-256 over its token ids) are computed once per request and timed apart. The floor is the time of making
one candidate and one score per target and finding the least: what any policy with reasons must do.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

from engine.protocol import CachedTokens, EngineLoad
from kvstore.keys import PUBLIC_SCOPE, KeyChain
from router.dispatcher import Dispatcher
from router.index import PrefixIndex
from router.policies.registry import POLICY_NAMES, make_policy
from router.values import Candidate, Query, Score

BLOCK_TOKENS = 64
PROMPTS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--decisions", type=int, default=2000)
    parser.add_argument("--policies", default=",".join(POLICY_NAMES))
    options = parser.parse_args()
    rng = random.Random(0)
    prompts = [[rng.randrange(1 << 17) for _ in range(options.blocks * BLOCK_TOKENS)] for _ in range(PROMPTS)]
    begun_s = time.process_time()
    chains = [KeyChain(PUBLIC_SCOPE, BLOCK_TOKENS).extend(prompt) for prompt in prompts]
    keys_us = (time.process_time() - begun_s) / PROMPTS * 1e6
    print(f"{options.targets} targets, prompts of {options.blocks} blocks of {BLOCK_TOKENS} tokens")
    print(f"{'keys of a prompt':24} {keys_us:8.1f} us")
    print(f"{'floor':24} {_median_us(lambda: _floor(options.targets), options.decisions):8.1f} us")
    for name in options.policies.split(","):
        print(f"{name:24} {_policy_us(name, options.targets, chains, options.decisions):8.1f} us")


def _policy_us(name: str, targets: int, chains: list[list[bytes]], decisions: int) -> float:
    """Return the median CPU time of a decision with its answer and its end, in microseconds."""
    rng = random.Random(1)
    index = PrefixIndex(1_000_000, time.monotonic)
    dispatcher = Dispatcher(make_policy(name, time.monotonic, rng), index, time.monotonic, rng)
    for number in range(targets):
        dispatcher.add_target(f"worker-{number}/0")
        dispatcher.report_load(f"worker-{number}/0", EngineLoad(kv_blocks_total=10_000, kv_blocks_used=number))
    for keys in chains:
        for number in rng.sample(range(targets), max(1, targets // 8)):
            index.apply(f"worker-{number}/0", stored=keys[: len(keys) // 2])

    def decide() -> None:
        keys = rng.choice(chains)
        tokens = len(keys) * BLOCK_TOKENS + 7
        lease = dispatcher.choose(Query(request_id="r", prompt_tokens=tokens, keys=keys, session_id="s"))
        assert lease is not None
        lease.first_output(CachedTokens(device=lease.hit.device))
        lease.release("ok")

    return _median_us(decide, decisions)


def _floor(targets: int) -> None:
    candidates = [Candidate(target_id="t", in_flight=number) for number in range(targets)]
    scores = [Score(target_id=one.target_id, cost=one.in_flight, reasons={"in_flight": 1.0}) for one in candidates]
    min(scores, key=lambda score: score.cost)


def _median_us(call: Callable[[], None], times: int) -> float:
    for _ in range(times // 10):
        call()
    samples = []
    for _ in range(times):
        begun_ns = time.process_time_ns()
        call()
        samples.append((time.process_time_ns() - begun_ns) / 1e3)
    return statistics.median(samples)


if __name__ == "__main__":
    main()
