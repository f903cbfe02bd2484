"""Llama, Mistral, Qwen2, Qwen3: pre-norm decoder, rotary positions, grouped queries, gated MLP, by configuration.

A model knows its layers and their order. Where KV lives and how attention reads it is the attention back end's; which
arithmetic the products use is `RowOps`'.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.base import AttentionBackend, AttentionBatch, FusedAttention
from engine.layers.fp8 import WeightPart
from engine.layers.linear import Linear, values_of
from engine.layers.mlp import GatedMLP
from engine.layers.rms_norm import RMSNorm
from engine.layers.rotary import RotaryTables
from engine.layers.row_ops import RowOps
from engine.models.llama_config import LlamaConfig
from engine.protocol import KVGroupSpec

KVCache = tuple[Tensor, Tensor]
"""Keys and values of one layer (layout: engine/attention/base.py)."""

Angles = tuple[Tensor, Tensor]
"""cos and sin of a step's positions (`RotaryTables.at`)."""


class LlamaAttention(nn.Module):
    def __init__(
        self,
        config: LlamaConfig,
        ops: RowOps,
        backend: AttentionBackend,
        rotary: RotaryTables,
        dtype: torch.dtype,
        device: torch.device,
        window_tokens: int | None,
    ) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.qkv = Linear(config.hidden_size, sizes, bias=config.attention_bias, ops=ops, dtype=dtype, device=device)
        self.output = Linear(
            sizes[0], (config.hidden_size,), bias=config.output_bias, ops=ops, dtype=dtype, device=device
        )
        self.query_norm = self.key_norm = None
        if config.qk_norm:
            self.query_norm = RMSNorm(head_dim, config.rms_eps, ops=ops, dtype=dtype, device=device)
            self.key_norm = RMSNorm(head_dim, config.rms_eps, ops=ops, dtype=dtype, device=device)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.scale, self.window_tokens = head_dim**-0.5, window_tokens
        self.rotary, self.backend = rotary, backend
        self._fused = backend if isinstance(backend, FusedAttention) else None

    def forward(self, x: Tensor, angles: Angles | None, batch: AttentionBatch, cache: KVCache) -> Tensor:
        """`angles` may be None for a fused back end, which looks them up itself."""
        qkv = self.qkv(x).view(x.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        query_norm, key_norm = self.query_norm, self.key_norm
        if self._fused is not None:
            query = self._fused.rotate_and_write_kv(
                qkv,
                self.rotary.cos,
                self.rotary.sin,
                *cache,
                batch,
                q_norm=None if query_norm is None else query_norm.weight,
                k_norm=None if key_norm is None else key_norm.weight,
                eps=0.0 if query_norm is None else query_norm.eps,
            )
        else:
            assert angles is not None
            if query_norm is not None and key_norm is not None:
                _norm_heads(qkv[:, : self.heads], query_norm)
                _norm_heads(qkv[:, self.heads : self.heads + self.kv_heads], key_norm)
            rotated = self.rotary.rotate(qkv[:, : self.heads + self.kv_heads], *angles)
            query, key = rotated[:, : self.heads], rotated[:, self.heads :]
            self.backend.write_kv(key, qkv[:, self.heads + self.kv_heads :], *cache, batch)
        attended = self.backend.attend(query, *cache, batch, scale=self.scale, window_tokens=self.window_tokens)
        output: Tensor = self.output(attended.reshape(x.shape[0], -1))
        return output

    def named_parts(self, prefix: str) -> Iterator[tuple[str, WeightPart]]:
        yield from self.qkv.named_parts(*(f"{prefix}.{part}_proj" for part in "qkv"))
        yield from self.output.named_parts(f"{prefix}.o_proj")
        if self.query_norm is not None and self.key_norm is not None:
            yield f"{prefix}.q_norm.weight", self.query_norm.weight
            yield f"{prefix}.k_norm.weight", self.key_norm.weight


def _norm_heads(heads: Tensor, norm: RMSNorm) -> None:
    """Norm every head of `heads` [tokens, heads, head_dim] in place: it is a part of a product nobody else has."""
    heads.copy_(norm(heads.reshape(-1, heads.shape[-1])).view(heads.shape))


class LlamaLayer(nn.Module):
    def __init__(
        self,
        config: LlamaConfig,
        ops: RowOps,
        backend: AttentionBackend,
        rotary: RotaryTables,
        dtype: torch.dtype,
        device: torch.device,
        window_tokens: int | None,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_eps
        self.attention_norm = RMSNorm(size, eps, ops=ops, dtype=dtype, device=device)
        self.attention = LlamaAttention(config, ops, backend, rotary, dtype, device, window_tokens)
        self.mlp_norm = RMSNorm(size, eps, ops=ops, dtype=dtype, device=device)
        self.mlp = GatedMLP(size, config.intermediate_size, bias=config.mlp_bias, ops=ops, dtype=dtype, device=device)

    def forward(
        self, x: Tensor | None, residual: Tensor, angles: Angles | None, batch: AttentionBatch, cache: KVCache
    ) -> Tensor:
        """`x` is what the layer before has not added to `residual` yet; this layer returns the same of its own. So
        each addition is one pass with the norm that follows it. `residual` changes in place."""
        normed = self.attention_norm(residual) if x is None else self.attention_norm.of_sum(x, residual)
        x = self.attention(normed, angles, batch, cache)
        output: Tensor = self.mlp(self.mlp_norm.of_sum(x, residual))
        return output

    def named_parts(self, prefix: str) -> Iterator[tuple[str, WeightPart]]:
        yield f"{prefix}.input_layernorm.weight", self.attention_norm.weight
        yield from self.attention.named_parts(f"{prefix}.self_attn")
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
        self._groups = _kv_groups(config)
        group_of = {layer: index for index, group in enumerate(self._groups) for layer in group.layers}
        self.group_of_layer = tuple(group_of[layer] for layer in range(config.layers))
        self.layers = nn.ModuleList(
            LlamaLayer(config, ops, backend, self.rotary, dtype, device, self._groups[group].window_tokens)
            for group in self.group_of_layer
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_eps, ops=ops, dtype=dtype, device=device)
        self.head = self.embedding
        if not config.tied_embeddings:
            self.head = nn.Parameter(torch.empty_like(embedding), requires_grad=False)
        self._linear, self._pack = ops.linear, ops.pack
        self.is_fused = isinstance(backend, FusedAttention)

    def forward(self, token_ids: Tensor, batches: Sequence[AttentionBatch], caches: Sequence[KVCache]) -> Tensor:
        """Return [tokens, hidden]. `batches` has one entry per KV group, `caches` one per layer; KV is written."""
        angles = self.rotary.at(batches[0].positions) if not self.is_fused else None
        residual = F.embedding(token_ids, self.embedding)
        x: Tensor | None = None
        for layer, group, cache in zip(self.layers, self.group_of_layer, caches, strict=True):
            x = layer(x, residual, angles, batches[group], cache)
        assert x is not None, "a model has layers"
        return self.norm.of_sum(x, residual)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, vocab] for rows of `forward`'s result."""
        return self._linear(hidden, self.head, None)

    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        return self._groups

    def excerpt(self) -> Llama:
        """Return a model of the first layer of each KV group, on the same weights: it does whatever a layer does."""
        part = copy.copy(self)
        part.__dict__["_modules"] = dict(self._modules)
        chosen = sorted(group.layers[0] for group in self._groups)
        part.layers = nn.ModuleList(self.layers[layer] for layer in chosen)
        part.group_of_layer = tuple(self.group_of_layer[layer] for layer in chosen)
        part._groups = tuple(
            msgspec.structs.replace(group, layers=(chosen.index(group.layers[0]),)) for group in self._groups
        )
        return part

    def named_parts(self) -> Iterator[tuple[str, WeightPart]]:
        """Yield (checkpoint name, view to fill) of every parameter, by Hugging Face's names, in a fixed order."""
        yield "model.embed_tokens.weight", self.embedding
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaLayer)
            yield from layer.named_parts(f"model.layers.{index}")
        yield "model.norm.weight", self.norm.weight
        if not self.config.tied_embeddings:
            yield "lm_head.weight", values_of(self.head)

    def pack(self) -> None:
        """Give the filled weights the layout that products read fastest. A tied head becomes a copy of its own."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
        self.head = nn.Parameter(self._pack(self.head.data), requires_grad=False)


def _kv_groups(config: LlamaConfig) -> tuple[KVGroupSpec, ...]:
    """Return the layers that see everything and those with a window, each as a group if there are any."""
    sliding = tuple(sorted(config.sliding_layers))
    full = tuple(layer for layer in range(config.layers) if layer not in config.sliding_layers)
    shape = {"kv_heads": config.kv_heads, "head_dim": config.head_dim}
    groups = []
    if full:
        groups.append(KVGroupSpec(kind="full", layers=full, **shape))
    if sliding:
        window = config.window_tokens
        groups.append(KVGroupSpec(kind="sliding_window", layers=sliding, window_tokens=window, **shape))
    return tuple(groups)
