"""Whether an engine under load answers alike wherever its prompts' KV comes from.

    python -m benchmarks.kv_check [--model smollm2] [--device cpu] [--prompts 50] [--rounds 3] DIRECTORY

In invariant mode (float32 and bfloat16) tokens and logprobs have to be bitwise those of an engine without a store, with
loads and saves going on beside the steps: from memory, after the device has forgotten all, and from disk, after a
restart. In default mode tokens may differ, and the share of answers that do is told beside that of the same engine
without a store, asked again in another order. Exit code 1 when a bit differs in invariant mode, or nothing was loaded.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.llm import LLM, Completion
from engine.protocol import SamplingParams
from kvstore.tier import Deadline

WAIT_S = 120.0
SHARED_TOKENS = 300
OUTPUT_TOKENS = 32

Answers = dict[int, tuple[object, ...]]


def prompts(count: int, longest: int, vocab_size: int) -> list[list[int]]:
    """Prompts of mixed length, every other one behind one of three shared beginnings."""
    rng = random.Random(count)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(4, vocab_size) for _ in range(length)]

    shared = [tokens(SHARED_TOKENS) for _ in range(3)]
    return [
        [*(shared[index % 3] if index % 2 else []), *tokens(rng.randint(1, longest - SHARED_TOKENS))]
        for index in range(count)
    ]


def ask(llm: LLM, asked: Sequence[list[int]], seed: int) -> tuple[Answers, int]:
    """Ask all at once, in an order of the seed's. Return what was answered, and the tokens that tiers supplied."""
    order = random.Random(seed).sample(range(len(asked)), len(asked))
    samplings = [
        SamplingParams(temperature=0.0 if index % 3 else 0.8, seed=7, max_tokens=OUTPUT_TOKENS, logprobs=1)
        for index in order
    ]
    answers = llm.generate([asked[index] for index in order], samplings, progress=False)
    loaded = sum(one.usage.cached.total - one.usage.cached.device for one in answers)
    return {index: _told(one) for index, one in zip(order, answers, strict=True)}, loaded


def _told(one: Completion) -> tuple[object, ...]:
    return one.token_ids, one.logprobs, one.finish_reason


def differing(first: Answers, second: Answers, *, tokens_only: bool) -> int:
    return sum(first[index][0] != second[index][0] if tokens_only else first[index] != second[index] for index in first)


class Check:
    """One mode of one model."""

    def __init__(self, arguments: argparse.Namespace, numerics: str, dtype: str) -> None:
        self._arguments = arguments
        self._settings: dict[str, object] = {
            "numerics": numerics,
            "dtype": dtype,
            "device": arguments.device,
            "max_model_len": 2048,
            "kv_load": "always",
        }
        self._name, self._bitwise = f"{numerics} {dtype}", numerics == "invariant"
        self.failed = False

    def run(self) -> None:
        arguments, directory = self._arguments, self._arguments.directory / self._name.replace(" ", "-")
        shutil.rmtree(directory, ignore_errors=True)
        with LLM(arguments.model, **self._settings) as llm:
            asked = prompts(arguments.prompts, 1200, llm.info.vocab_size)
            cold, _ = ask(llm, asked, 0)
            self._forget(llm)
            again, _ = ask(llm, asked, 1)
        self._compare("computed again", cold, again, loaded=None)
        specs = ("ram=4GiB", f"disk={directory},16GiB,min-free=1MiB")
        with LLM(arguments.model, kv_store=specs, **self._settings) as llm:
            for number in range(arguments.rounds):
                answers, loaded = ask(llm, asked, number)
                self._compare("saving" if number == 0 else "from memory", cold, answers, loaded if number else None)
                self._forget(llm)
        with LLM(arguments.model, kv_store=specs, **self._settings) as llm:
            answers, loaded = ask(llm, asked, 9)
            self._compare("from disk", cold, answers, loaded)

    def _forget(self, llm: LLM) -> None:
        assert llm._core is not None
        if llm._store is not None:
            llm._store.store.flush(Deadline.after(WAIT_S))
        llm._core.reset_prefix_cache()

    def _compare(self, what: str, cold: Answers, other: Answers, loaded: int | None) -> None:
        count = differing(cold, other, tokens_only=not self._bitwise)
        wrong = (self._bitwise and count > 0) or loaded == 0
        self.failed |= wrong
        told = "" if loaded is None else f", {loaded} tokens loaded"
        print(f"{'WRONG' if wrong else 'ok':<6} {self._name}, {what}: {count} of {len(cold)} answers differ{told}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", default="invariant-float32,invariant-bfloat16,default-bfloat16")
    arguments = parser.parse_args()
    checks = [Check(arguments, *mode.split("-")) for mode in arguments.modes.split(",")]
    for check in checks:
        check.run()
    sys.exit(int(any(check.failed for check in checks)))


if __name__ == "__main__":
    main()
