"""Real engines over a KV store: prompts that share prefixes, what they are answered, and where their KV came from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine.llm import LLM, Completion
from engine.protocol import SamplingParams
from kvstore.manager.store import KVStore
from kvstore.tier import Deadline
from tests.support.tiny_models import VOCAB_SIZE

BLOCK = 16
TIERS = ("ram", "disk", "remote")


@contextmanager
def engine(model: Path, *tiers: str, **settings: object) -> Iterator[LLM]:
    fixed = {"numerics": "invariant", "dtype": "float32", "threads": 1, "device": "cpu", "block_size": BLOCK}
    fixed["kv_load"] = "always"
    with LLM(str(model), kv_store=tiers, **{**fixed, **settings}) as llm:
        yield llm


def prompts(count: int, longest: int = 160) -> list[list[int]]:
    rng = random.Random(count)
    shared = rng.choices(range(4, VOCAB_SIZE), k=3 * BLOCK)
    own = [rng.choices(range(4, VOCAB_SIZE), k=rng.randint(1, longest - len(shared))) for _ in range(count)]
    return [[*shared, *one] if index % 2 else one for index, one in enumerate(own)]


def samplings(count: int, max_tokens: int = 20) -> list[SamplingParams]:
    """Every third is seeded, the others are greedy."""
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2, ignore_eos=True)
    seeded = SamplingParams(temperature=0.9, seed=7, max_tokens=max_tokens, logprobs=2, ignore_eos=True)
    return [greedy if index % 3 else seeded for index in range(count)]


def complete(llm: LLM, asked: Sequence[Sequence[int]], max_tokens: int = 20) -> list[Completion]:
    return llm.generate(asked, samplings(len(asked), max_tokens), progress=False)


def told(completions: Sequence[Completion]) -> list[object]:
    return [(one.token_ids, one.logprobs, one.finish_reason) for one in completions]


def loaded(completions: Sequence[Completion]) -> dict[str, int]:
    return {tier: sum(getattr(one.usage.cached, tier) for one in completions) for tier in TIERS}


def store_of(llm: LLM) -> KVStore:
    assert llm._store is not None
    return llm._store.store


def forget_device(llm: LLM) -> None:
    assert llm._core is not None
    llm._core.reset_prefix_cache()


def forget(llm: LLM) -> None:
    """Forget what the device holds, once everything is stored."""
    assert store_of(llm).flush(Deadline.after(60.0))
    forget_device(llm)


def forget_memory(llm: LLM) -> None:
    """Forget what the device and memory hold: prompts come from the tiers below, or are computed."""
    forget(llm)
    store_of(llm).ram.drop()
