"""Every architecture through the engine's core: the same bits alone, batched, chunked, cached, preempted and resumed;
and a window's blocks are given back behind it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.protocol import EngineInfo, GenerateRequest, SamplingParams, TokenLogprobs
from engine.runner.build import build_engine
from engine.runner.kv_cache import block_bytes
from tests.support.decoders import DECODERS, WINDOW, write_decoder
from tests.support.tiny_models import VOCAB_SIZE, write_tiny

BLOCK = 16
PROMPT = random.Random(3).choices(range(4, VOCAB_SIZE), k=2 * WINDOW + 3)
OUTPUT_TOKENS = 14
_numbers = itertools.count()


@dataclass
class Run:
    """A request and what came out; `cached` are the prompt tokens that were not computed."""

    request: GenerateRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached: int = 0
    reason: str | None = None


@dataclass
class Engine:
    info: EngineInfo
    core: EngineCore

    def start(self, prompt: Sequence[int], *, max_tokens: int = OUTPUT_TOKENS, resume: Sequence[int] = ()) -> Run:
        sampling = SamplingParams(temperature=0.8, seed=7, max_tokens=max_tokens, ignore_eos=True, logprobs=3)
        request_id = str(next(_numbers))
        request = GenerateRequest(
            request_id=request_id, prompt_ids=list(prompt), sampling=sampling, resume_ids=list(resume)
        )
        self.core.submit(request)
        return Run(request)

    def finish(self, *runs: Run) -> int:
        """Step until all have ended; return the most blocks that were in use."""
        by_id = {run.request.request_id: run for run in runs}
        most = 0
        while self.core.has_work:
            for output in self.core.step():
                run = by_id[output.request_id]
                run.token_ids += output.token_ids
                run.logprobs += output.logprobs or []
                run.reason = output.finish_reason or run.reason
                run.cached = output.cached.total if output.cached else run.cached
            most = max(most, self.core.kv.blocks_used)
        self.core.check_integrity()
        assert self.core.kv.blocks_used == 0
        assert {run.reason for run in runs} == {"length"}
        return most


def start_engine(model: Path, **settings: object) -> Engine:
    config = EngineConfig(
        **{
            "model": str(model),
            "device": "cpu",
            "numerics": "invariant",
            "dtype": "float32",
            "block_size": BLOCK,
            "kv_cache_memory_bytes": 8 << 20,
            "max_running": 8,
            "threads": 1,
            **settings,
        }  # type: ignore[arg-type]
    )
    info, runner, num_blocks, _ = build_engine(config, lambda fraction, phase: None)
    return Engine(info, EngineCore(info, config, runner, num_blocks))


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def cache_bytes(info: EngineInfo, tokens: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the memory in which every group holds `tokens`."""
    return (tokens // BLOCK + 1) * sum(block_bytes(group, BLOCK, dtype) for group in info.kv_groups)


def check_equal(run: Run, expected: Run, *, first: int = 0) -> None:
    assert run.token_ids == expected.token_ids[first:]
    assert run.logprobs == expected.logprobs[first:]


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in DECODERS), ("qwen3, biases, mixed", "bfloat16")]
)
def test_a_request_has_the_same_bits_whatever_happens_to_it(tmp_path: Path, name: str, dtype: str) -> None:
    directory = write_decoder(tmp_path, name)
    engine = start_engine(directory, dtype=dtype, prefix_cache=False)
    alone = engine.start(PROMPT)
    engine.finish(alone)
    assert len(set(alone.token_ids)) > 3  # a model that repeats itself would prove nothing
    resumed = engine.start(PROMPT, resume=alone.token_ids[:5])
    engine.finish(resumed)
    check_equal(resumed, alone, first=5)

    cached = start_engine(directory, dtype=dtype, max_step_tokens=23)
    rng = random.Random(4)
    crowd = [cached.start(rng.choices(PROMPT, k=rng.randint(1, 70)), max_tokens=rng.randint(1, 20)) for _ in range(6)]
    among_others = cached.start(PROMPT)
    cached.finish(*crowd, among_others)
    assert among_others.cached == 0
    check_equal(among_others, alone)
    again = cached.start(PROMPT)
    cached.finish(again)
    assert again.cached == len(PROMPT) // BLOCK * BLOCK
    check_equal(again, alone)

    short, longer = PROMPT[:20], 4 * OUTPUT_TOKENS
    alone = engine.start(short, max_tokens=longer)
    engine.finish(alone)
    scarce = start_engine(
        directory,
        dtype=dtype,
        max_model_len=len(short) + longer,
        kv_cache_memory_bytes=cache_bytes(engine.info, 7 * BLOCK, getattr(torch, dtype)),
    )
    runs = [scarce.start(PROMPT[number : 20 + number], max_tokens=longer) for number in (5, 3, 0)]
    scarce.finish(*runs)
    assert scarce.core.load().preemptions_total > 0
    check_equal(runs[-1], alone)


@pytest.mark.parametrize("numerics", ["default", "invariant"])
def test_a_windows_blocks_are_given_back_behind_it(tmp_path: Path, numerics: str) -> None:
    window_blocks = -(-WINDOW // BLOCK) + 1
    sliding = start_engine(write_decoder(tmp_path / "sliding", "mistral, windows"), numerics=numerics)
    full = start_engine(write_decoder(tmp_path / "full", "mistral, full"), numerics=numerics)
    (group,) = sliding.info.kv_groups
    assert (group.kind, group.window_tokens) == ("sliding_window", WINDOW)
    for engine, most in ((sliding, window_blocks), (full, -(-(150 + 8) // BLOCK))):
        run = engine.start(PROMPT[:8], max_tokens=150)
        assert engine.finish(run) == most
    # A prompt computed in one step needs blocks for all its tokens, once; a chunk only those of the chunk.
    chunked = start_engine(tmp_path / "sliding", numerics=numerics, max_step_tokens=BLOCK)
    prompt = PROMPT * 4
    assert len(prompt) > 8 * WINDOW
    assert chunked.finish(chunked.start(prompt)) <= window_blocks + 1


def test_a_cache_of_one_window_serves_the_whole_length(tmp_path: Path) -> None:
    directory = write_decoder(tmp_path, "mistral, windows")
    plenty = start_engine(directory)
    room = cache_bytes(plenty.info, (-(-WINDOW // BLOCK) + 1) * BLOCK)
    tight = start_engine(directory, kv_cache_memory_bytes=room)
    assert tight.info.kv_capacity_tokens == tight.info.max_model_len == 512
    assert tight.core.kv.blocks_total == -(-WINDOW // BLOCK) + 1
    runs = [engine.start(PROMPT, max_tokens=150) for engine in (plenty, tight)]
    for engine, run in zip((plenty, tight), runs, strict=True):
        engine.finish(run)
    check_equal(runs[1], runs[0])


def test_full_layers_get_what_windows_beside_them_cannot_use(tmp_path: Path) -> None:
    directory = write_tiny(
        tmp_path,
        "Qwen2ForCausalLM",
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
        max_position_embeddings=4096,
    )
    engine = start_engine(directory, max_running=2, kv_cache_memory_bytes=16 << 20)
    full, sliding = engine.info.kv_groups
    assert (full.kind, full.layers, sliding.kind, sliding.layers) == ("full", (0, 1), "sliding_window", (2, 3))
    full_pool, sliding_pool = engine.core.kv.pools
    assert sliding_pool.capacity == 2 * (-(-WINDOW // BLOCK) + 1)
    assert full_pool.capacity > 10 * sliding_pool.capacity
    bytes_used = sum(
        pool.num_blocks * block_bytes(group, BLOCK, torch.float32)
        for pool, group in zip(engine.core.kv.pools, engine.info.kv_groups, strict=True)
    )
    assert (16 << 20) - block_bytes(full, BLOCK, torch.float32) < bytes_used <= 16 << 20
    run = engine.start(PROMPT)
    engine.finish(run)
