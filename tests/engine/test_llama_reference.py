"""Our Llama against transformers': logits, greedy tokens, and decode against prefill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.accuracy import (
    PROMPTS,
    chat_ids,
    compare_greedy,
    decode_against_prefill_kl,
    greedy_outputs,
    reference_logits,
    reference_model,
    relative_difference,
)
from benchmarks.plan_driver import PlanDriver
from engine.loader.packaged import ensure
from tests.support.loading import load, smollm2
from tests.support.tiny_models import VOCAB_SIZE, write_tiny_llama

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, object]] = {
    "grouped queries, tied": {},
    "one kv head, untied": {"kv_heads": 1, "tied": False},
    "multi-head, biases": {"kv_heads": 4, "attention_bias": True, "mlp_bias": True},
    "wide heads, llama3 rope": {"head_dim": 32, "rope_parameters": LLAMA3_ROPE},
    "odd sizes": {"hidden_size": 72, "heads": 6, "kv_heads": 3, "intermediate_size": 100, "vocab_size": 301},
}


def transformers_model(directory: Path) -> nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def random_tokens(count: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    tokens: list[int] = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


@pytest.mark.parametrize("numerics", ["default", "invariant"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_llamas_give_transformers_logits_however_they_are_chunked(
    tmp_path: Path, variant: str, numerics: str
) -> None:
    directory = write_tiny_llama(tmp_path, **VARIANTS[variant])  # type: ignore[arg-type]
    tokens = random_tokens(150)
    expected = reference_logits(transformers_model(directory), tokens)
    driver = PlanDriver(load(directory, numerics=numerics), num_blocks=64, block_size=16)
    for chunk in (150, 64, 7, 1):
        assert relative_difference(driver.all_logits(tokens, chunk), expected) < 1e-4, chunk


def test_half_precision_stays_near_float32(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path)
    tokens = random_tokens(100)
    expected = reference_logits(transformers_model(directory), tokens)
    for dtype, limit in (("bfloat16", 0.05), ("float16", 0.01)):
        logits = PlanDriver(load(directory, dtype), num_blocks=8).all_logits(tokens, 32)
        assert 0 < relative_difference(logits.float(), expected) < limit, dtype


@pytest.fixture(scope="module")
def smollm2_reference() -> nn.Module:
    return reference_model(str(ensure("smollm2")))


def test_smollm2_gives_transformers_logits(smollm2_reference: nn.Module) -> None:
    loaded = smollm2()
    driver = PlanDriver(loaded, num_blocks=4)
    for prompt in PROMPTS[:2]:
        ids = chat_ids(loaded, prompt)
        expected = reference_logits(smollm2_reference, ids)
        assert relative_difference(driver.all_logits(ids, len(ids)), expected) < 1e-4
        assert relative_difference(driver.all_logits(ids, 7), expected) < 1e-4


def test_smollm2_greedy_tokens_are_transformers_up_to_the_first_near_tie(smollm2_reference: nn.Module) -> None:
    loaded = smollm2()
    prompts = [chat_ids(loaded, prompt) for prompt in PROMPTS[:8]]
    outputs = greedy_outputs(loaded, prompts, 16)
    agreement = compare_greedy(smollm2_reference, prompts, outputs)
    assert agreement.mismatches == 0
    assert agreement.to_end >= 6  # near ties are rare: the comparison reaches the end of most prompts


def test_decoding_step_by_step_gives_the_prefills_distribution() -> None:
    loaded = smollm2()
    mean, largest = decode_against_prefill_kl(loaded, chat_ids(loaded, " ".join(PROMPTS))[:40], chunk=1)
    assert mean < 1e-6
    assert largest < 1e-6
