"""Invariant numerics: logits are bitwise equal alone, batched, chunked, cached, and preempted and resumed."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.plan_driver import DrivenSequence, PlanDriver
from engine.layers.row_ops import check_row_independence, row_ops
from engine.loader.load import LoadedModel
from tests.support.cpp import library_or_skip
from tests.support.loading import load, smollm2
from tests.support.tiny_models import write_tiny_llama

DTYPES = ("float32", "bfloat16")
CHUNKS = (1, 5, 16, 27)
TINY = {
    "grouped": {},
    "odd sizes, biases": {
        "hidden_size": 72,
        "heads": 6,
        "kv_heads": 3,
        "intermediate_size": 100,
        "attention_bias": True,
        "mlp_bias": True,
        "tied": False,
    },
}


def tokens_of(loaded: LoadedModel, count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(loaded.vocab_size), k=count)


def decode(driver: PlanDriver, sequence: DrivenSequence, steps: int) -> list[Tensor]:
    """Return the logits of `steps` single decode steps of a computed sequence."""
    logits = []
    for _ in range(steps):
        driver.tap.clear()
        driver.step([(sequence, 1)], on_device=True)
        logits.append(driver.tap.take()[-1])
    return logits


def alone(driver: PlanDriver, prompt: list[int], steps: int) -> tuple[list[int], Tensor]:
    """Return a sequence's tokens and the logits that chose the new ones, computed by itself and unchunked."""
    sequence = driver.open(prompt)
    driver.tap.clear()
    driver.prefill(sequence, len(prompt))
    logits = [driver.tap.take()[-1], *decode(driver, sequence, steps - 1)]
    driver.close(sequence)
    return sequence.tokens, torch.stack(logits)


def batched(driver: PlanDriver, prompt: list[int], steps: int, seed: int) -> tuple[list[int], Tensor]:
    """The same among random neighbours that come, prefill in chunks, decode and go."""
    rng = random.Random(seed)
    sequence, neighbours, logits = driver.open(prompt), [], []
    vocab = range(10, 200)
    while len(logits) < steps:
        if len(neighbours) < 5 and rng.random() < 0.7:
            neighbours.append(driver.open(rng.choices(vocab, k=rng.randint(1, 60))))
        wanted = [(other, min(rng.randint(1, 23), len(other.tokens) - other.computed)) for other in neighbours]
        at = rng.randint(0, len(wanted))
        wanted.insert(at, (sequence, min(rng.randint(1, 40), len(sequence.tokens) - sequence.computed)))
        samples = [other.computed + count == len(other.tokens) for other, count in wanted]
        driver.tap.clear()
        driver.step(wanted)
        if samples[at]:
            logits.append(driver.tap.take()[sum(samples[:at])])
        if neighbours and rng.random() < 0.3:
            driver.close(neighbours.pop(rng.randrange(len(neighbours))))
    for other in (*neighbours, sequence):
        driver.close(other)
    return sequence.tokens, torch.stack(logits)


def check_all(
    loaded: LoadedModel, *, prompt_tokens: int, steps: int, block_size: int, rounds: int, chunks: tuple[int, ...]
) -> None:
    driver = PlanDriver(loaded, num_blocks=64, block_size=block_size, max_slots=16)
    prompt = tokens_of(loaded, prompt_tokens, seed=1)
    tokens, expected = alone(driver, prompt, steps)

    for seed in range(rounds):
        got_tokens, got = batched(driver, prompt, steps, seed)
        assert got_tokens == tokens, f"batched, seed {seed}"
        assert torch.equal(got, expected), f"batched, seed {seed}"

    whole = driver.all_logits(tokens, len(tokens))
    assert torch.equal(whole[prompt_tokens - 1 : -1], expected), "decoded against one prefill of all tokens"
    for chunk in chunks:
        assert torch.equal(driver.all_logits(tokens, chunk), whole), f"chunks of {chunk}"

    owner = driver.open(prompt)
    driver.prefill(owner, len(prompt))
    for cached_tokens in range(block_size, prompt_tokens + 1, block_size):
        hit = driver.open(prompt, cached=owner, cached_tokens=cached_tokens)
        driver.tap.clear()
        driver.prefill(hit, 13)
        assert torch.equal(driver.tap.take()[-1], expected[0]), f"{cached_tokens} tokens cached"
        assert torch.equal(torch.stack(decode(driver, hit, steps - 1)), expected[1:]), f"{cached_tokens} cached"
        assert hit.tokens == tokens
        driver.close(hit, shared_blocks=cached_tokens // block_size)

    for stop in (1, steps // 2):
        # Preempted: its blocks go to others, and prompt and outputs are prefilled again in one piece.
        resumed = driver.open(tokens[: prompt_tokens + stop])
        driver.tap.clear()
        driver.prefill(resumed, 33)
        got = [driver.tap.take()[-1], *decode(driver, resumed, steps - stop - 1)]
        assert torch.equal(torch.stack(got), expected[stop:]), f"resumed after {stop}"
        driver.close(resumed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", TINY)
@pytest.mark.parametrize("operators", ["cpp", "torch"])
def test_tiny_llamas_are_bitwise_invariant(tmp_path: Path, variant: str, dtype: str, operators: str) -> None:
    if operators == "cpp":
        library_or_skip()
    directory = write_tiny_llama(tmp_path, **TINY[variant])  # type: ignore[arg-type]
    loaded = load(directory, dtype, "invariant", operators=operators)
    check_all(loaded, prompt_tokens=48, steps=12, block_size=16, rounds=3, chunks=CHUNKS)


@pytest.mark.parametrize("kv_dtype", ["dtype", "fp8"])
@pytest.mark.parametrize("variant", TINY)
def test_tiny_llamas_in_fp8_are_bitwise_invariant(tmp_path: Path, variant: str, kv_dtype: str) -> None:
    directory = write_tiny_llama(tmp_path, **TINY[variant])  # type: ignore[arg-type]
    loaded = load(directory, "bfloat16", "invariant", weights="fp8", kv_dtype=kv_dtype)
    check_all(loaded, prompt_tokens=48, steps=6, block_size=16, rounds=2, chunks=(5, 27))


@pytest.mark.parametrize("dtype", DTYPES)
def test_smollm2_is_bitwise_invariant(dtype: str) -> None:
    check_all(smollm2(dtype, "invariant"), prompt_tokens=33, steps=3, block_size=16, rounds=1, chunks=(7, 16))


def test_two_threads_change_nothing_within_a_process(tmp_path: Path) -> None:
    loaded = load(write_tiny_llama(tmp_path), "float32", "invariant", operators="torch")
    torch.set_num_threads(2)
    try:
        check_all(loaded, prompt_tokens=32, steps=4, block_size=16, rounds=1, chunks=(5,))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_operator_ignores_the_number_and_order_of_rows(dtype: torch.dtype) -> None:
    ops = row_ops("invariant", torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for width in (33, 100, 576, 1536):
        rows = (torch.randn(50, width, generator=generator) * 3).to(dtype)
        weight = (torch.randn(40, width, generator=generator) / width**0.5).to(dtype)
        scale = torch.randn(width, generator=generator).to(dtype)
        pairs = torch.cat((rows, rows.flip(0)), dim=-1)
        operators = {
            "linear": (rows, lambda x, w=weight: ops.linear(x, w, None)),
            "rms_norm": (rows, lambda x, s=scale: ops.rms_norm(x, s, 1e-5)),
            "silu_and_mul": (pairs, ops.silu_and_mul),
        }
        for name, (x, operator) in operators.items():
            whole = operator(x)
            for count in (1, 2, 3, 7, 16, 17, 33, 50):
                for first in (0, 50 - count):
                    part = operator(x[first : first + count].clone())
                    assert torch.equal(part, whole[first : first + count]), (name, width, count, first)


def test_a_product_that_depends_on_the_batch_is_caught_at_the_start() -> None:
    from engine.errors import ConfigError

    ops = row_ops("invariant", torch.device("cpu"))

    def leaky(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return ops.linear(x, weight, bias) + x.shape[0] * 1e-6

    broken = replace(ops, linear=leaky)
    weights = [torch.randn(32, 64)]
    check_row_independence(ops, weights, torch.float32)
    with pytest.raises(ConfigError, match="does not hold on this machine"):
        check_row_independence(broken, weights, torch.float32)
