"""An engine with a store computes the same tokens and logprobs wherever a prompt's KV comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.decoders import DECODERS, write_decoder
from tests.support.remote_tiers import running_server
from tests.support.store_llm import BLOCK, complete, engine, forget, forget_memory, loaded, prompts, told
from tests.support.tiny_models import write_tiny_llama


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
            forget_memory(llm)


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
