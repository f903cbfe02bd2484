"""Llama and what shares its architecture: pre-norm decoder, rotary positions, grouped queries, gated MLP.

A model knows its layers and their order. Where KV lives and how attention reads it is the attention back end's; which
arithmetic the products use is `RowOps`'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.base import AttentionBackend, AttentionBatch
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP
from engine.layers.rms_norm import RMSNorm
from engine.layers.rotary import RotaryTables
from engine.layers.row_ops import RowOps
from engine.models.llama_config import LlamaConfig
from engine.protocol import KVGroupSpec

KVCache = tuple[Tensor, Tensor]
"""Keys and values of one layer (layout: engine/attention/base.py)."""


class LlamaAttention(nn.Module):
    def __init__(
        self,
        config: LlamaConfig,
        ops: RowOps,
        backend: AttentionBackend,
        rotary: RotaryTables,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        bias = config.attention_bias
        sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.qkv = Linear(config.hidden_size, sizes, bias=bias, ops=ops, dtype=dtype, device=device)
        self.output = Linear(sizes[0], (config.hidden_size,), bias=bias, ops=ops, dtype=dtype, device=device)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.scale = head_dim**-0.5
        self.rotary, self.backend = rotary, backend

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], batch: AttentionBatch, cache: KVCache) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        rotated = self.rotary.rotate(qkv[:, : self.heads + self.kv_heads], *angles)
        query, key = rotated[:, : self.heads], rotated[:, self.heads :]
        value = qkv[:, self.heads + self.kv_heads :]
        self.backend.write_kv(key, value, *cache, batch)
        attended = self.backend.attend(query, *cache, batch, scale=self.scale)
        output: Tensor = self.output(attended.reshape(x.shape[0], -1))
        return output


class LlamaLayer(nn.Module):
    def __init__(
        self,
        config: LlamaConfig,
        ops: RowOps,
        backend: AttentionBackend,
        rotary: RotaryTables,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_eps
        self.attention_norm = RMSNorm(size, eps, ops=ops, dtype=dtype, device=device)
        self.attention = LlamaAttention(config, ops, backend, rotary, dtype, device)
        self.mlp_norm = RMSNorm(size, eps, ops=ops, dtype=dtype, device=device)
        self.mlp = GatedMLP(size, config.intermediate_size, bias=config.mlp_bias, ops=ops, dtype=dtype, device=device)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], batch: AttentionBatch, cache: KVCache) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles, batch, cache)
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output

    def named_parts(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        attention = f"{prefix}.self_attn"
        yield f"{prefix}.input_layernorm.weight", self.attention_norm.weight
        yield from self.attention.qkv.named_parts(*(f"{attention}.{part}_proj" for part in "qkv"))
        yield from self.attention.output.named_parts(f"{attention}.o_proj")
        yield f"{prefix}.post_attention_layernorm.weight", self.mlp_norm.weight
        yield from self.mlp.named_parts(f"{prefix}.mlp")


class Llama(nn.Module):
    """Token ids to final hidden states; `compute_logits` turns the rows that matter into logits.

    `max_positions` is the longest sequence that will be served; rotary tables end there.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        ops: RowOps,
        backend: AttentionBackend,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        self.rotary = RotaryTables(config.head_dim, max_positions, config.rope, device)
        embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.layers = nn.ModuleList(
            LlamaLayer(config, ops, backend, self.rotary, dtype, device) for _ in range(config.layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_eps, ops=ops, dtype=dtype, device=device)
        self.head = self.embedding
        if not config.tied_embeddings:
            self.head = nn.Parameter(torch.empty_like(embedding), requires_grad=False)
        self._linear = ops.linear

    def forward(self, token_ids: Tensor, batches: Sequence[AttentionBatch], caches: Sequence[KVCache]) -> Tensor:
        """Return [tokens, hidden]. `batches` has one entry per KV group, `caches` one per layer; KV is written."""
        angles = self.rotary.at(batches[0].positions)
        x = F.embedding(token_ids, self.embedding)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, angles, batches[0], cache)
        hidden: Tensor = self.norm(x)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, vocab] for rows of `forward`'s result."""
        return self._linear(hidden, self.head, None)

    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        config = self.config
        layers = tuple(range(config.layers))
        return (KVGroupSpec(kind="full", layers=layers, kv_heads=config.kv_heads, head_dim=config.head_dim),)

    def named_parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, view to fill) of every parameter, by Hugging Face's names, in a fixed order."""
        yield "model.embed_tokens.weight", self.embedding
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaLayer)
            yield from layer.named_parts(f"model.layers.{index}")
        yield "model.norm.weight", self.norm.weight
        if not self.config.tied_embeddings:
            yield "lm_head.weight", self.head
