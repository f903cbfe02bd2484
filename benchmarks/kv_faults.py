"""What a failing server costs: time to the first token while it fails, beside an engine without a store.

    python -m benchmarks.kv_faults [--model smollm2] [--tokens 200] [--requests 60]

Needs the extra `test`, for the server. Two engines in this process take turns with prompts that nobody has asked
before: one has no store, the other one memory and a server that is well, full, stopped (SIGSTOP) or killed. Told are
p50 and p99 by fault and their ratio to the turns without a store in the same phase. The bar for p99 is 10 %, or twice
what the engine without a store differs between its odd and its even turns. Exit code 1 when it is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from redis import Redis

from engine.llm import LLM
from engine.protocol import SamplingParams
from tests.support.valkey_server import ValkeyServer, valkey_server

BAR = 0.10
FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


class Bench:
    """The two engines, and the prompts that they are asked."""

    def __init__(self, plain: LLM, stored: LLM, tokens: int) -> None:
        self._plain, self._stored, self._tokens = plain, stored, tokens
        self._rng = random.Random(1)

    def phase(self, name: str, requests: int) -> bool:
        """Print one fault's figures; return whether p99 is within the bar."""
        without, having = [], []
        for _ in range(requests):
            without.append(self._ask(self._plain))
            having.append(self._ask(self._stored))
        spread = abs(percentile(without[::2], 0.99) / percentile(without[1::2], 0.99) - 1)
        ratio = percentile(having, 0.99) / percentile(without, 0.99)
        kept = ratio <= 1 + max(BAR, 2 * spread)
        median = percentile(having, 0.5)
        print(
            f"{name:<8} p50 {median:7.1f} ms ({median / percentile(without, 0.5):.3f} of none), "
            f"p99 {percentile(having, 0.99):7.1f} ms ({ratio:.3f}, own spread {spread:.3f}): "
            f"{'kept' if kept else 'NOT KEPT'}",
            flush=True,
        )
        return kept

    def _ask(self, llm: LLM) -> float:
        prompt = self._rng.choices(range(4, self._plain.info.vocab_size), k=self._tokens)
        begun = time.perf_counter()
        llm.generate([prompt], FIRST_TOKEN, progress=False)
        return (time.perf_counter() - begun) * 1000


def fill(server: ValkeyServer) -> None:
    with Redis(port=server.port) as client:
        client.config_set("maxmemory", 1)


FAULTS: dict[str, Callable[[ValkeyServer], object]] = {
    "well": lambda server: None,
    "full": fill,
    "stopped": lambda server: server.signal(signal.SIGSTOP),
    "killed": ValkeyServer.stop,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--requests", type=int, default=60)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv") as directory, valkey_server(Path(directory)) as server:
        asyncio.run(server.wait_ready())
        settings = {"device": "cpu", "max_model_len": arguments.tokens + 16}
        with (
            LLM(arguments.model, **settings) as plain,
            LLM(arguments.model, kv_store=["ram=256MiB", server.url], **settings) as stored,
        ):
            bench = Bench(plain, stored, arguments.tokens)
            bench.phase("warm", 4)
            kept = []
            for name, begin in FAULTS.items():
                begin(server)
                kept.append(bench.phase(name, arguments.requests))
    sys.exit(int(not all(kept)))


if __name__ == "__main__":
    main()
