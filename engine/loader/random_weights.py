"""Models of published shapes with random weights, for measuring speed without files: "random:llama-3.1-8b".

Weights are normal and scaled so that activations keep their size; they are made on the device that runs them. Such a
model speaks token ids alone: it has no text. Qwen3's shape is without its norms of query and key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from engine.loader.checkpoint import Digest, TextFiles
from engine.loader.random_shapes import RANDOM_PREFIX, shape_named
from engine.models.llama_config import LlamaConfig


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by Hugging Face's name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (query, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, query),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _no_text() -> bytes:
    """Return the tokenizer.json of a vocabulary without entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str()).encode()


class RandomCheckpoint:
    """A checkpoint that was never stored. Equal names give equal weights on one kind of device."""

    architecture = "LlamaForCausalLM"
    eos_ids: tuple[int, ...] = ()
    text = TextFiles(tokenizer=_no_text())

    def __init__(self, shape: str, device: torch.device) -> None:
        self.path = Path(f"{RANDOM_PREFIX}{shape}")
        self.config = shape_named(shape)
        self._shapes = tensor_shapes(self.config)
        self._device = device

    @property
    def generation_defaults(self) -> dict[str, float | int]:
        return {}

    @property
    def tensor_names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, digest: Digest) -> Tensor:
        """Return the tensor in bfloat16. In the digest the sum of its bits stands for its bytes: it would take long to
        bring those from a GPU, and how they are drawn changes for all tensors at once if at all."""
        shape = self._shapes[name]
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
        generator = torch.Generator(self._device).manual_seed(seed)
        values = torch.randn(shape, generator=generator, device=self._device, dtype=torch.bfloat16)
        values = values.mul_(0.1).add_(1.0) if len(shape) == 1 else values.mul_(shape[1] ** -0.5)
        bits = values.view(torch.int16).sum(dtype=torch.int64).item()
        digest.update(f"random {name} {shape} {bits}\n".encode())
        return values

    def close(self) -> None:
        pass
