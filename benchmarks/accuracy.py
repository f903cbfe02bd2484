"""How close a model's outputs are to `transformers`, and a decode to a prefill, in figures.

    python -m benchmarks.accuracy [--model smollm2] [--prompts 20] [--tokens 64]

Logits: largest difference over largest magnitude, float32. Greedy: tokens equal to the reference's until the prompt's
first near tie (two best logits closer than 1e-3). KL: of step-by-step decode against one prefill, teacher-forced.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from benchmarks.plan_driver import PlanDriver
from engine.config import EngineConfig
from engine.loader.load import LoadedModel, load_model, open_checkpoint

NEAR_TIE = 1e-3

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three prime numbers larger than 50.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "What is 17 times 23?",
    "Write a Python function that reverses a string.",
    "Who wrote 'Pride and Prejudice'?",
    "Name the planets of the solar system.",
    "How do I boil an egg?",
    "What does 'carpe diem' mean?",
    "Tell me a joke about computers.",
    "Describe a sunset in the mountains.",
    "What are the benefits of regular exercise?",
    "Convert 100 degrees Fahrenheit to Celsius.",
    "Write a short letter to thank a friend.",
    "How many continents are there, and which is the largest?",
)


@dataclass(frozen=True, slots=True)
class GreedyAgreement:
    """`compared` tokens were equal; `to_end` of `prompts` met no near tie; `mismatches` differed without one."""

    prompts: int
    to_end: int
    compared: int
    mismatches: int


def load(model: str, dtype: str, numerics: str = "default") -> LoadedModel:
    config = {"model": model, "dtype": dtype, "numerics": numerics, "device": "cpu", "max_model_len": 512}
    return load_model(EngineConfig(**config), lambda fraction, phase: None)  # type: ignore[arg-type]


def reference_model(model: str) -> nn.Module:
    """Return transformers' LlamaForCausalLM in float32 with the weights of our own loader."""
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(model)
    config = checkpoint.config
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.rms_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=config.tied_embeddings,
        )
    )
    weights = {name: checkpoint.read(name, _NoDigest()).float() for name in checkpoint.tensor_names}
    checkpoint.close()
    missing, unexpected = reference.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"the reference differs from the file: {missing} {unexpected}")
    reference.tie_weights()
    module: nn.Module = reference.train(False)
    return module


class _NoDigest:
    def update(self, data: bytes | memoryview, /) -> None: ...


def chat_ids(loaded: LoadedModel, prompt: str) -> list[int]:
    """Return the ids of a one-turn ChatML prompt."""
    tokenizer = Tokenizer.from_str(loaded.assets[loaded.text.tokenizer.digest].decode())
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def relative_difference(logits: Tensor, reference: Tensor) -> float:
    """Return the largest difference over the largest magnitude."""
    return ((logits - reference).abs().max() / reference.abs().max()).item()


@torch.inference_mode()
def reference_logits(reference: nn.Module, tokens: Sequence[int]) -> Tensor:
    logits: Tensor = reference(torch.tensor([tokens])).logits[0]
    return logits


def greedy_outputs(loaded: LoadedModel, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Return the greedy continuation of every prompt, decoded as one batch."""
    blocks = sum(-(-(len(prompt) + tokens) // 64) for prompt in prompts) + 1
    driver = PlanDriver(loaded, num_blocks=blocks, max_slots=len(prompts))
    sequences = [driver.open(prompt) for prompt in prompts]
    driver.step([(sequence, len(sequence.tokens)) for sequence in sequences])
    for _ in range(tokens - 1):
        driver.step([(sequence, 1) for sequence in sequences], on_device=True)
    driver.tap.clear()
    return [sequence.tokens[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


def compare_greedy(reference: nn.Module, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> GreedyAgreement:
    """Compare with the reference, which is forced along our tokens: equal up to a place means equal there too."""
    to_end = compared = mismatches = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = reference_logits(reference, prompt + output[:-1])[len(prompt) - 1 :]
        best = logits.topk(2).values
        for index, token in enumerate(output):
            if best[index, 0] - best[index, 1] < NEAR_TIE:
                break
            if int(logits[index].argmax()) != token:
                mismatches += 1
                break
            compared += 1
        else:
            to_end += 1
    return GreedyAgreement(len(prompts), to_end, compared, mismatches)


def decode_against_prefill_kl(loaded: LoadedModel, tokens: Sequence[int], chunk: int = 1) -> tuple[float, float]:
    """Return mean and largest KL(prefill || decode) over the positions, both in float64."""
    driver = PlanDriver(loaded, num_blocks=2 * (-(-len(tokens) // 64)) + 1)
    whole, stepped = (
        torch.log_softmax(driver.all_logits(tokens, size).double(), dim=-1) for size in (len(tokens), chunk)
    )
    divergence = (whole.exp() * (whole - stepped)).sum(dim=-1)
    return divergence.mean().item(), divergence.max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    loaded = load(arguments.model, "float32")
    reference = reference_model(arguments.model)
    prompts = [chat_ids(loaded, prompt) for prompt in PROMPTS[: arguments.prompts]]
    outputs = greedy_outputs(loaded, prompts, arguments.tokens)
    driver = PlanDriver(loaded, num_blocks=9)
    worst = max(
        relative_difference(driver.all_logits(ids, len(ids)), reference_logits(reference, ids)) for ids in prompts
    )
    print(f"logits against transformers, float32: {worst:.2e} relative over {len(prompts)} prompts")
    print(compare_greedy(reference, prompts, outputs))
    del reference
    text = [token for prompt, output in zip(prompts, outputs, strict=True) for token in prompt + output][:256]
    for dtype in ("float32", "bfloat16"):
        model = loaded if dtype == "float32" else load(arguments.model, dtype)
        mean, largest = decode_against_prefill_kl(model, text)
        print(f"KL of decode against prefill, {dtype}, {len(text)} positions: mean {mean:.2e}, largest {largest:.2e}")


if __name__ == "__main__":
    main()
