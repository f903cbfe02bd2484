"""One small random model per architecture and switch, for tests that must hold for all of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.support.tiny_models import write_tiny

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
WINDOW = 40
"""Neither a multiple of a block nor of a query tile."""

DECODERS: dict[str, tuple[str, dict[str, object]]] = {
    "llama3 rope": ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": ("LlamaForCausalLM", {"rope_parameters": LINEAR_ROPE, "tie_word_embeddings": True}),
    "mistral, windows": ("MistralForCausalLM", {"sliding_window": WINDOW, "head_dim": 32}),
    "mistral, full": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2, yarn": ("Qwen2ForCausalLM", {"rope_parameters": YARN_ROPE}),
    "qwen2, windows behind full": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3, biases, mixed": (
        "Qwen3ForCausalLM",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    ),
}


def write_decoder(directory: Path, name: str, *, seed: int = 0) -> Path:
    architecture, values = DECODERS[name]
    return write_tiny(directory, architecture, seed=seed, **values)


def transformers_model(directory: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
