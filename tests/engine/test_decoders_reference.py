"""Every architecture against transformers': logits, greedy tokens, and decode against prefill."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.accuracy import (
    compare_greedy,
    decode_against_prefill_kl,
    greedy_outputs,
    reference_logits,
    relative_difference,
)
from benchmarks.plan_driver import PlanDriver
from tests.support.decoders import DECODERS, WINDOW, transformers_model, write_decoder
from tests.support.loading import load
from tests.support.tiny_models import VOCAB_SIZE

TOKENS = random.Random(0).choices(range(VOCAB_SIZE), k=3 * WINDOW)


@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_transformers_however_they_are_chunked(tmp_path: Path, name: str) -> None:
    directory = write_decoder(tmp_path, name)
    expected = reference_logits(transformers_model(directory), TOKENS)
    for numerics, chunks in (("default", (len(TOKENS), 50, 7)), ("invariant", (13,))):
        driver = PlanDriver(load(directory, numerics=numerics), num_blocks=32, block_size=16)
        for chunk in chunks:
            assert relative_difference(driver.all_logits(TOKENS, chunk), expected) < 1e-4, (numerics, chunk)


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens_are_transformers_up_to_the_first_near_tie(tmp_path: Path, name: str) -> None:
    directory = write_decoder(tmp_path, name, seed=1)
    prompts = [TOKENS[:5], TOKENS[20:80], TOKENS[10 : 10 + WINDOW]]
    outputs = greedy_outputs(load(directory), prompts, 32)
    agreement = compare_greedy(transformers_model(directory), prompts, outputs)
    assert agreement.mismatches == 0
    assert agreement.compared > 32


@pytest.mark.parametrize("name", DECODERS)
def test_decoding_step_by_step_gives_the_prefills_distribution(tmp_path: Path, name: str) -> None:
    loaded = load(write_decoder(tmp_path, name))
    _, largest = decode_against_prefill_kl(loaded, TOKENS, chunk=1)
    assert largest < 1e-6
