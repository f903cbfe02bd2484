"""A Llama whose steps are one list of C++ jobs each: the layers' order once more, for engine/cpu_ops.

Activations stay float32 from the embedding to the logits; weights and KV are in the model's dtype. Every operator's
rows are independent of each other, so both numerics modes are this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.attention.base import AttentionBatch
from engine.cpu_ops.abi import LinearMode
from engine.cpu_ops.library import Library
from engine.cpu_ops.packing import PackedWeight, pack, pack_bias, pack_int8
from engine.cpu_ops.program import Program, quantized_width
from engine.layers.fp8 import WeightPart
from engine.layers.linear import Linear
from engine.layers.row_ops import TILE_ROWS, check_product
from engine.models.llama import KVCache, Llama, LlamaAttention, LlamaLayer
from engine.protocol import KVGroupSpec

RESIDUAL, NORMED, QKV, ATTENDED, INNER, OUTPUT, QUANTIZED = range(7)
"""The buffers of a step."""


class LlamaInJobs:
    """Takes the weights of a filled Llama: it is empty afterwards."""

    def __init__(self, llama: Llama, library: Library, threads: int, *, int8: bool = False) -> None:
        self._llama, self._library, self._int8 = llama, library, int8
        self._packed: dict[Linear, PackedWeight] = {}
        config = llama.config
        widths = [0] * 7
        widths[RESIDUAL] = widths[NORMED] = config.hidden_size
        widths[QKV] = (config.heads + 2 * config.kv_heads) * config.head_dim
        widths[ATTENDED] = config.heads * config.head_dim
        widths[INNER] = config.intermediate_size
        if int8:
            widths[QUANTIZED] = max(quantized_width(width) for width in widths)
        self._program = Program(library, widths, threads)
        self._program.embed(RESIDUAL, llama.embedding)
        for index, layer in enumerate(llama.layers):
            assert isinstance(layer, LlamaLayer)
            self._add_layer(layer, index)
        self._program.norm(RESIDUAL, OUTPUT, llama.norm.weight, llama.norm.eps)
        self._head = self._pack(llama.head.data)
        self._logits = Program(library, (0, 0, widths[QUANTIZED]), threads)
        if int8:
            self._logits.quantize(0, 2, config.hidden_size)
        self._logits.linear(2 if int8 else 0, 1, self._head, None)
        if not config.tied_embeddings:
            llama.head.data = torch.empty(0, dtype=llama.head.dtype)

    def __call__(self, token_ids: Tensor, batches: Sequence[AttentionBatch], caches: Sequence[KVCache]) -> Tensor:
        """Return float32 [tokens, hidden]; KV is written."""
        hidden = torch.empty(len(token_ids), self._llama.config.hidden_size)
        self._program.run(len(token_ids), {OUTPUT: hidden}, token_ids=token_ids, batches=batches, caches=caches)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [rows, vocab] for rows of `__call__`'s result."""
        logits = torch.empty(len(hidden), self._llama.config.vocab_size)
        self._logits.run(len(hidden), {0: hidden, 1: logits})
        return logits

    def check_row_independence(self) -> None:
        """Prove on this machine that a row's logits do not depend on its neighbours, or raise ConfigError. All products
        are of the same function as these."""
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(TILE_ROWS, self._llama.config.hidden_size, generator=generator)
        check_product(self.compute_logits, rows, f"the head's {self._head.type.name.lower()}")

    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        return self._llama.kv_groups()

    def named_parts(self) -> Iterator[tuple[str, WeightPart]]:
        """Yield (checkpoint name, values) of every parameter; those of packed weights are copies."""
        for linear, packed in self._packed.items():
            linear.weight.data = packed.values()
        head = self._llama.head
        if not self._llama.config.tied_embeddings:
            head.data = self._head.values()
        try:
            yield from self._llama.named_parts()
        finally:
            for linear in self._packed:
                _empty(linear)
            if not self._llama.config.tied_embeddings:
                head.data = torch.empty(0, dtype=head.dtype)

    def _add_layer(self, layer: LlamaLayer, index: int) -> None:
        program = self._program
        program.norm(RESIDUAL, NORMED, layer.attention_norm.weight, layer.attention_norm.eps)
        self._add_attention(layer.attention, index)
        program.norm(RESIDUAL, NORMED, layer.mlp_norm.weight, layer.mlp_norm.eps)
        self._add_linear(NORMED, INNER, layer.mlp.gate_up, LinearMode.SILU_MUL)
        self._add_linear(INNER, RESIDUAL, layer.mlp.down, LinearMode.ADD)

    def _add_attention(self, attention: LlamaAttention, index: int) -> None:
        group = self._llama.group_of_layer[index]
        heads = (attention.heads, attention.kv_heads, attention.head_dim)
        query_norm, key_norm = attention.query_norm, attention.key_norm
        self._add_linear(NORMED, QKV, attention.qkv, LinearMode.STORE)
        self._program.rotate_and_write(
            QKV,
            heads,
            (attention.rotary.cos, attention.rotary.sin),
            layer=index,
            group=group,
            norms=None if query_norm is None or key_norm is None else (query_norm.weight, key_norm.weight),
            eps=0.0 if query_norm is None else query_norm.eps,
        )
        self._program.attend(
            QKV,
            ATTENDED,
            heads,
            layer=index,
            group=group,
            scale=attention.scale,
            window=attention.window_tokens,
        )
        self._add_linear(ATTENDED, RESIDUAL, attention.output, LinearMode.ADD)

    def _add_linear(self, source: int, target: int, linear: Linear, mode: LinearMode) -> None:
        lanes, paired = self._library.lanes, mode == LinearMode.SILU_MUL
        packed = self._pack(linear.weight.data, paired=paired)
        bias = None if linear.bias is None else pack_bias(linear.bias.data, lanes, paired=paired)
        if self._int8:
            self._program.quantize(source, QUANTIZED, packed.inputs)
        self._program.linear(QUANTIZED if self._int8 else source, target, packed, bias, mode)
        self._packed[linear] = packed
        _empty(linear)

    def _pack(self, weight: Tensor, *, paired: bool = False) -> PackedWeight:
        return (pack_int8 if self._int8 else pack)(weight, self._library.lanes, paired=paired)


def _empty(linear: Linear) -> None:
    linear.weight.data = torch.empty(0, dtype=linear.weight.dtype)
