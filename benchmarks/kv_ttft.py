"""Time to the first token of a prompt whose KV comes from each tier of the store, beside computing it.

    python -m benchmarks.kv_ttft [--model smollm2] [--device cpu] [--tokens 2000] [--rounds 5] DIRECTORY

One engine in this process, in default mode. Each round has a prompt of its own: computed (cold), then from the device,
memory, disk and a server, with all tiers emptied that are faster. `--server` names one, "none" leaves it out, and else
one is started from the extra `test`. The limits are 0.10 of cold for memory and 0.15 for the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.llm import LLM
from engine.protocol import SamplingParams
from kvstore.tier import Deadline, Tier

if TYPE_CHECKING:
    from tests.support.valkey_server import ValkeyServer

LIMITS = {"ram": 0.10, "disk": 0.15, "remote": 0.15}
WAIT_S = 120.0


class Bench:
    """One engine over all tiers."""

    def __init__(self, llm: LLM, tokens: int) -> None:
        assert llm._store is not None
        assert llm._core is not None
        self._llm, self._tokens = llm, tokens
        self._store, self._core = llm._store.store, llm._core

    def round(self, number: int) -> dict[str, float]:
        """Return milliseconds by tier. Raises RuntimeError when a prompt came from elsewhere."""
        prompt = random.Random(number).choices(range(1000, 20_000), k=self._tokens)
        times = {"cold": self._ask(prompt, "none"), "device": self._ask(prompt, "device")}
        if not self._store.flush(Deadline.after(WAIT_S)):
            raise RuntimeError("the store was not written in time")
        tiers: list[Tier] = [self._store.ram, *self._store.lower]
        for tier in tiers:
            self._core.reset_prefix_cache()
            times[tier.name] = self._ask(prompt, tier.name)
            # What lies above the next tier goes; saving again is what loading does, so it is waited for.
            self._store.flush(Deadline.after(WAIT_S))
            for above in tiers[: tiers.index(tier) + 1]:
                above.drop()
        self._core.reset_prefix_cache()
        return times

    def _ask(self, prompt: list[int], expected: str) -> float:
        begun = time.perf_counter()
        (answer,) = self._llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1), progress=False)
        elapsed_ms = (time.perf_counter() - begun) * 1000
        cached = answer.usage.cached
        had = max(cached.__struct_fields__, key=lambda tier: getattr(cached, tier)) if cached.total else "none"
        if had != expected:
            raise RuntimeError(f"the prompt came from {had} ({cached}), not from {expected}")
        return elapsed_ms


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", help="a Redis or Valkey server's URL, or none")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--ram", default="2GiB")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        specs = [f"ram={arguments.ram}", f"disk={arguments.directory},64GiB,min-free=1MiB"]
        if arguments.server != "none":
            specs.append(arguments.server or stack.enter_context(_server()).url)
        settings = {"device": arguments.device, "max_model_len": arguments.max_model_len}
        llm = stack.enter_context(LLM(arguments.model, kv_store=specs, kv_load="always", **settings))
        bench = Bench(llm, arguments.tokens)
        bench.round(-1)
        rounds = [bench.round(number) for number in range(arguments.rounds)]
    sys.exit(_tell(rounds, arguments.out))


def _tell(rounds: list[dict[str, float]], out: Path | None) -> int:
    """Print medians over rounds, and of the rounds' ratios to cold; return 1 where one is over its limit."""
    missed = 0
    ratios = {}
    for tier in rounds[0]:
        times = [one[tier] for one in rounds]
        ratios[tier] = statistics.median(one[tier] / one["cold"] for one in rounds)
        limit = LIMITS.get(tier)
        kept = "" if limit is None else f", at most {limit}: {'kept' if ratios[tier] <= limit else 'NOT KEPT'}"
        missed |= limit is not None and ratios[tier] > limit
        spread = f"{min(times):.1f} to {max(times):.1f}"
        print(f"{tier:<7} {statistics.median(times):9.1f} ms ({spread}), {ratios[tier]:.3f} of cold{kept}")
    if out is not None:
        out.write_text(json.dumps({"rounds_ms": rounds, "ratios": ratios}, indent=1) + "\n")
    return int(missed)


@contextmanager
def _server() -> Iterator[ValkeyServer]:
    from tests.support.valkey_server import valkey_server

    with tempfile.TemporaryDirectory(prefix="kv") as directory, valkey_server(Path(directory)) as server:
        asyncio.run(server.wait_ready())
        yield server


if __name__ == "__main__":
    main()
