"""The shape of a model in a GGUF file, from its metadata. Needs no torch and reads no weights."""

from __future__ import annotations

import math
from math import prod

from engine.errors import ModelError
from engine.layers.rope_settings import LinearScaling, RopeSettings
from engine.loader.gguf import GGUFFile
from engine.loader.gguf_blocks import decode
from engine.models.llama_config import MAX_HEAD_DIM, MAX_LAYERS, LlamaConfig

ROPE_DIVISORS = "rope_freqs.weight"

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""llama.cpp's name of an architecture and Hugging Face's. Mistral files call themselves llama."""


class GGUFConfig:
    """`prefix` is llama.cpp's name of the architecture, with which its keys begin. Raises ModelError for others."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            known = ", ".join(repr(known) for known in ARCHITECTURES)
            raise ModelError(f"{file.path}: architecture {name!r} is not supported (supported: {known})")
        self.prefix, self.architecture = name, ARCHITECTURES[name]

    def read(self) -> LlamaConfig:
        """Return the shape. Raises ModelError."""
        if self._integer("expert_count", 0):
            raise ModelError(f"{self._file.path}: mixture-of-experts models are not supported in GGUF files")
        rope = self._rope()
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelError(f"{self._file.path}: tensor 'token_embd.weight' is missing or no matrix")
        hidden, heads = self._integer("embedding_length"), self._integer("attention.head_count")
        layers, positions = self._integer("block_count"), self._integer("context_length")
        if layers > MAX_LAYERS:
            raise ModelError(f"{self._file.path}: impossible model shape: {layers} layers")
        window = self._window(positions)
        config = LlamaConfig(
            vocab_size=embedding.shape[0],
            hidden_size=hidden,
            intermediate_size=self._integer("feed_forward_length"),
            layers=layers,
            heads=heads,
            kv_heads=self._integer("attention.head_count_kv", heads),
            head_dim=self._integer("attention.key_length", hidden // max(heads, 1)),
            rms_eps=self._number("attention.layer_norm_rms_epsilon"),
            max_positions=positions,
            rope=rope,
            tied_embeddings="output.weight" not in self._file.tensors,
            attention_bias=self.prefix == "qwen2" or "blk.0.attn_q.bias" in self._file.tensors,
            output_bias="blk.0.attn_output.bias" in self._file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in self._file.tensors,
            qk_norm=self.prefix == "qwen3",
            window_tokens=window,
            sliding_layers=() if window is None else tuple(range(layers)),
        )
        if problem := config.problem():
            raise ModelError(f"{self._file.path}: impossible model shape: {problem}")
        if self._integer("rope.dimension_count", config.head_dim) != config.head_dim:
            raise ModelError(f"{self._file.path}: rotary embedding of a part of each head is not supported")
        return config

    def _rope(self) -> RopeSettings:
        theta, kind = self._number("rope.freq_base", 10000.0), self._value("rope.scaling.type", "none")
        divisors = self._rope_divisors()
        if kind == "linear" and divisors is None:
            return RopeSettings(theta, LinearScaling(max(self._number("rope.scaling.factor", 1.0), 1.0)))
        if kind != "none":
            raise ModelError(f"{self._file.path}: rope scaling {kind!r} is not supported in GGUF files")
        return RopeSettings(theta, frequency_divisors=divisors)

    def _window(self, positions: int) -> int | None:
        """Return the window of all layers; files whose window is of some layers only do not say of which."""
        window = self._integer("attention.sliding_window", 0)
        if window <= 0 or window >= positions:
            return None
        if self.prefix != "llama":
            raise ModelError(f"{self._file.path}: a sliding window is not supported in GGUF files of {self.prefix!r}")
        return window

    def _rope_divisors(self) -> tuple[float, ...] | None:
        entry = self._file.tensors.get(ROPE_DIVISORS)
        if entry is None:
            return None
        if prod(entry.shape) > MAX_HEAD_DIM:
            raise ModelError(f"{self._file.path}: tensor {ROPE_DIVISORS!r} has the impossible shape {entry.shape}")
        return tuple(decode(self._file.read(entry.name), entry.format, entry.shape).ravel().tolist())

    def _value(self, key: str, default: object) -> object:
        return self._file.metadata.get(f"{self.prefix}.{key}", default)

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{self._file.path}: key '{self.prefix}.{key}' is missing or no integer")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, (int, float)):
            raise ModelError(f"{self._file.path}: key '{self.prefix}.{key}' is missing or no number")
        if not math.isfinite(value):
            raise ModelError(f"{self._file.path}: key '{self.prefix}.{key}' must be finite, not {value}")
        return float(value)
