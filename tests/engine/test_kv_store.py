"""An engine with a store computes the same tokens and logprobs wherever a prompt's KV comes from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.llm import LLM, Completion
from engine.protocol import SamplingParams
from kvstore.tier import Deadline
from tests.support.decoders import DECODERS, write_decoder
from tests.support.remote_tiers import running_server
from tests.support.tiny_models import VOCAB_SIZE, write_tiny_llama

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


def complete(llm: LLM, asked: Sequence[Sequence[int]]) -> list[Completion]:
    greedy = SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, ignore_eos=True)
    seeded = SamplingParams(temperature=0.9, seed=7, max_tokens=20, logprobs=2, ignore_eos=True)
    return llm.generate(asked, [greedy if index % 3 else seeded for index in range(len(asked))], progress=False)


def told(completions: Sequence[Completion]) -> list[object]:
    return [(one.token_ids, one.logprobs, one.finish_reason) for one in completions]


def loaded(completions: Sequence[Completion]) -> dict[str, int]:
    return {tier: sum(getattr(one.usage.cached, tier) for one in completions) for tier in TIERS}


def forget(llm: LLM) -> None:
    """Forget what the device holds, once everything is stored."""
    assert llm._core is not None
    assert llm._store is not None
    assert llm._store.store.flush(Deadline.after(60.0))
    llm._core.reset_prefix_cache()


def check_all_tiers(model: Path, directory: Path, url: str, asked: Sequence[Sequence[int]], **settings: object) -> None:
    """Compare a run without a store with runs whose prompts come from each tier."""
    with engine(model, **settings) as llm:
        cold = told(complete(llm, asked))
    disk = f"disk={directory / 'kv'},1GiB,min-free=1MiB"
    with engine(model, "ram=64MiB", disk, url, **settings) as llm:
        assert told(complete(llm, asked)) == cold, "saving changes tokens"
        forget(llm)
        again = complete(llm, asked)
        assert told(again) == cold, "memory changes tokens"
        assert loaded(again)["ram"] > 0
    with engine(model, "ram=64MiB", disk, **settings) as llm:
        again = complete(llm, asked)
        assert told(again) == cold, "a restart changes tokens"
        assert loaded(again)["disk"] > 0
    with engine(model, "ram=64MiB", url, **settings) as llm:
        while True:  # a busy machine's look-up may be too late, and then it is computed
            again = complete(llm, asked)
            assert told(again) == cold, "the server changes tokens"
            if loaded(again)["remote"]:
                break
            forget(llm)
            assert llm._store is not None
            llm._store.store.ram.drop()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server() as server:
        yield server.url


@pytest.mark.parametrize("name", DECODERS)
def test_every_architecture_from_every_tier(name: str, url: str, tmp_path: Path) -> None:
    check_all_tiers(write_decoder(tmp_path / "model", name), tmp_path, url, prompts(8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fifty_prompts_from_every_tier(dtype: str, url: str, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    check_all_tiers(model, tmp_path, url, prompts(50, longest=300), dtype=dtype)


def test_chunks_blocks_and_preemption_from_every_tier(url: str, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    blocks = 24
    memory = blocks * 2 * 2 * 2 * BLOCK * 16 * 4
    check_all_tiers(
        model, tmp_path, url, prompts(12), kv_cache_memory_bytes=memory, max_step_tokens=40, max_model_len=256
    )


def test_new_weights_are_another_namespace_on_every_engine_unless_they_are_named_alike(
    tmp_path: Path,
) -> None:
    model = write_tiny_llama(tmp_path / "model")
    asked = prompts(6)
    disk = f"disk={tmp_path / 'kv'},1GiB,min-free=1MiB"

    def computed_after(epoch: str | None) -> int:
        """Update the weights, run the prompts twice, and return how many tokens of the first run were loaded."""
        with engine(model, "ram=64MiB", disk) as llm:
            assert llm._store is not None
            assert llm._core is not None
            llm._core.reset_prefix_cache()
            llm._store.new_weights(epoch)
            tokens = sum(loaded(complete(llm, asked)).values())
            forget(llm)
            assert sum(loaded(complete(llm, asked)).values()) > 0
            return tokens

    assert computed_after(None) == 0
    assert computed_after(None) == 0
    assert computed_after("step 1000") == 0
    assert computed_after("step 1000") > 0


def test_kv_in_8_bits_comes_back_from_memory_and_disk_and_is_no_one_elses(tmp_path: Path) -> None:
    model, disk = write_tiny_llama(tmp_path / "model"), f"disk={tmp_path / 'kv'},1GiB,min-free=1MiB"
    asked, small = prompts(4), {"kv_dtype": "fp8", "operators": "torch"}
    with engine(model, "ram=64MiB", disk, **small) as llm:
        cold = told(complete(llm, asked))
        forget(llm)
        again = complete(llm, asked)
        assert told(again) == cold
        assert loaded(again)["ram"] > 0
    with engine(model, "ram=64MiB", disk, **small) as llm:
        again = complete(llm, asked)
        assert told(again) == cold
        assert loaded(again)["disk"] > 0
    with engine(model, "ram=64MiB", disk, operators="torch") as llm:
        assert sum(loaded(complete(llm, asked)).values()) == 0, "of another type than this engine's"
