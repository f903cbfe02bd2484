"""Penalties, bad words and prompt logprobs through the engine's core with a real runner: whatever is preempted, cached,
chunked or resumed on the way, tokens and values are those of a request that runs alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.protocol import GenerateRequest, SamplingParams, TokenLogprobs, TokenOutput
from engine.runner.build import build_engine
from tests.support.tiny_models import VOCAB_SIZE, write_tiny_llama

BLOCK_SIZE = 16
BLOCK_BYTES = 2 * 2 * 2 * 16 * BLOCK_SIZE * 4  # keys and values, layers, heads, head_dim, float32
MAX_MODEL_LEN = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_positions=MAX_MODEL_LEN)


@contextmanager
def running_core(model: Path, *, blocks: int = 200, **settings: object) -> Iterator[EngineCore]:
    fields = {"max_running": 6, "max_step_tokens": 512, "threads": 1, "block_size": BLOCK_SIZE, **settings}
    config = EngineConfig(
        model=str(model),
        dtype="float32",
        numerics="invariant",
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=blocks * BLOCK_BYTES,
        **fields,  # type: ignore[arg-type]
    )
    info, runner, num_blocks, _ = build_engine(config, lambda fraction, phase: None)
    try:
        yield EngineCore(info, config, runner, num_blocks)
    finally:
        runner.close()


@dataclass
class Taken:
    tokens: list[int] = field(default_factory=list)
    last: TokenOutput | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def finish_reason(self) -> str | None:
        return self.last.finish_reason if self.last else None


def run(core: EngineCore, requests: Sequence[GenerateRequest]) -> dict[str, Taken]:
    """Submit all and step to the end."""
    taken = {request.request_id: Taken() for request in requests}
    for request in requests:
        core.submit(request)
    while core.has_work:
        for output in core.step():
            own = taken[output.request_id]
            own.tokens += output.token_ids
            own.last = output
            if output.prompt_logprobs is not None:
                assert own.prompt_logprobs is None, "they come once"
                own.prompt_logprobs = output.prompt_logprobs
        core.check_integrity()
    return taken


def penalised_requests(count: int, seed: int) -> list[GenerateRequest]:
    """Long enough to need more blocks than a small pool has; every parameter that looks back is on somewhere."""
    rng = random.Random(seed)
    letters = list(range(40, 60))
    requests = []
    for index in range(count):
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.8]),
            seed=rng.getrandbits(60),
            max_tokens=60,
            ignore_eos=True,
            presence_penalty=rng.choice([0.0, 0.4]),
            frequency_penalty=rng.choice([0.0, 0.3, -0.2]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            bad_words=tuple(tuple(rng.choices(letters, k=2)) for _ in range(60)),
            logit_bias=dict.fromkeys(letters, 6.0),
        )
        prompt = rng.choices(letters, k=rng.randint(5, 40))
        requests.append(GenerateRequest(request_id=f"r{index}", prompt_ids=prompt, sampling=sampling))
    return requests


def test_preempted_overlapped_and_resumed_requests_choose_the_tokens_of_a_lone_one(model: Path) -> None:
    requests = penalised_requests(8, seed=3)
    alone: dict[str, list[int]] = {}
    with running_core(model, prefix_cache=False) as core:
        for request in requests:
            alone[request.request_id] = run(core, [request])[request.request_id].tokens
        assert core.load().preemptions_total == 0
        unpenalised = [
            GenerateRequest(
                request_id=request.request_id,
                prompt_ids=request.prompt_ids,
                sampling=SamplingParams(
                    temperature=request.sampling.temperature,
                    seed=request.sampling.seed,
                    max_tokens=60,
                    ignore_eos=True,
                    logit_bias=request.sampling.logit_bias,
                ),
            )
            for request in requests
        ]
        plain = run(core, unpenalised)
    assert all(len(tokens) == 60 for tokens in alone.values())
    assert sum(plain[name].tokens != tokens for name, tokens in alone.items()) >= 6, "the penalties do something"
    for in_flight in (1, 2):
        with running_core(model, blocks=18, in_flight_steps=in_flight, max_step_tokens=48) as core:
            together = run(core, requests)
            assert core.load().preemptions_total > 0
        assert {name: taken.tokens for name, taken in together.items()} == alone, f"{in_flight} steps in flight"
    rng = random.Random(5)
    with running_core(model) as core:
        cuts = {request.request_id: rng.randint(1, 59) for request in requests}
        resumed = [
            GenerateRequest(
                request_id=request.request_id,
                prompt_ids=request.prompt_ids,
                sampling=request.sampling,
                resume_ids=alone[request.request_id][: cuts[request.request_id]],
            )
            for request in requests
        ]
        again = run(core, resumed)
    for name, taken in again.items():
        assert taken.tokens == alone[name][cuts[name] :]


def test_bad_words_do_not_occur_in_any_output(model: Path) -> None:
    requests = penalised_requests(6, seed=9)
    with running_core(model) as core:
        answers = run(core, requests)
    for request in requests:
        tokens = answers[request.request_id].tokens
        assert not set(itertools.pairwise(tokens)) & set(request.sampling.bad_words)


def teacher_forced(model: Path, ids: Sequence[int]) -> torch.Tensor:
    """log_softmax of transformers' logits: row i is of the token at position i + 1."""
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        return torch.log_softmax(reference(torch.tensor([list(ids)])).logits[0].double(), dim=-1)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_prompt_logprobs_are_those_of_transformers_whatever_is_chunked_or_cached(model: Path, max_tokens: int) -> None:
    prompt = random.Random(1).choices(range(VOCAB_SIZE), k=75)
    expected = teacher_forced(model, prompt)
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=1)
    asked = GenerateRequest(request_id="a", prompt_ids=prompt, sampling=sampling, prompt_logprobs=3)
    for chunk in (7, 512):
        with running_core(model, max_step_tokens=chunk) as core:
            fresh = run(core, [asked])["a"]
            cached = run(core, [asked])["a"]
            without = run(core, [GenerateRequest(request_id="b", prompt_ids=prompt, sampling=sampling)])["b"]
        assert fresh.finish_reason == cached.finish_reason == without.finish_reason == "length"
        assert len(fresh.tokens) == max_tokens
        assert fresh.tokens == cached.tokens == without.tokens
        assert without.prompt_logprobs is None
        assert fresh.prompt_logprobs == cached.prompt_logprobs
        assert fresh.prompt_logprobs is not None
        assert len(fresh.prompt_logprobs) == len(prompt)
        assert fresh.prompt_logprobs[0] is None
        for position, entry in enumerate(fresh.prompt_logprobs[1:], start=1):
            assert entry is not None
            row = expected[position - 1]
            assert entry.logprob == pytest.approx(row[prompt[position]].item(), abs=2e-4)
            best = row.topk(3)
            assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=2e-4)


def test_requests_without_output_end_once_among_others(model: Path) -> None:
    rng = random.Random(2)
    requests = [
        GenerateRequest(
            request_id=f"r{index}",
            prompt_ids=rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 90)),
            sampling=SamplingParams(seed=index, max_tokens=index % 3, ignore_eos=True),
            prompt_logprobs=rng.choice([None, 0, 2]),
        )
        for index in range(12)
    ]
    with running_core(model, blocks=14, max_step_tokens=20, in_flight_steps=2) as core:
        answers = run(core, requests)
        assert core.kv.blocks_used == 0
    for request in requests:
        taken = answers[request.request_id]
        assert taken.finish_reason == "length"
        assert len(taken.tokens) == request.sampling.max_tokens
        wanted = 0 if request.prompt_logprobs is None else len(request.prompt_ids)
        assert len(taken.prompt_logprobs or ()) == wanted
