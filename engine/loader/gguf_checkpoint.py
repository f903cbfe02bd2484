"""A model in a GGUF file, seen as a checkpoint: llama.cpp's names and row order turned into Hugging Face's."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.layers.rotary import LinearScaling, RopeSettings
from engine.loader.checkpoint import Digest, TextFiles
from engine.loader.gguf import GGUFFile
from engine.loader.gguf_blocks import decode
from engine.models.llama_config import MAX_LAYERS, LlamaConfig
from engine.text.gguf_tokenizer import adds_bos, tokenizer_json

ROPE_DIVISORS = "rope_freqs.weight"

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""llama.cpp's name of an architecture and Hugging Face's. Mistral files call themselves llama."""

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_END_TOKENS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


class GGUFCheckpoint:
    """Owns the open file. GGUF has no place for sampling defaults: who knows the model's gives them."""

    def __init__(self, path: Path, generation_defaults: Mapping[str, float | int] | None = None) -> None:
        self.path = path
        self.generation_defaults = dict(generation_defaults or {})
        self._file = GGUFFile(path)
        try:
            self._stored = {_hf_name(name): name for name in self._file.tensors if name != ROPE_DIVISORS}
            self._prefix = self._read_architecture()
            self.architecture = ARCHITECTURES[self._prefix]
            self.config = self._read_config()
            self.text = self._read_text()
        except ModelError:
            self.close()
            raise

    @property
    def eos_ids(self) -> tuple[int, ...]:
        found = (self._file.metadata.get(key) for key in _END_TOKENS)
        return tuple(sorted({token for token in found if isinstance(token, int)}))

    @property
    def tensor_names(self) -> Collection[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._stored[name]].shape

    def read(self, name: str, digest: Digest) -> Tensor:
        entry = self._file.tensors[self._stored[name]]
        raw = self._file.read(entry.name)
        digest.update(raw)
        values = torch.from_numpy(decode(raw, entry.format, entry.shape))
        if self._prefix == "llama":  # the other architectures are stored as they are
            if ".q_proj." in name:
                return _rotate_half_order(values, self.config.heads)
            if ".k_proj." in name:
                return _rotate_half_order(values, self.config.kv_heads)
        return values

    def close(self) -> None:
        self._file.close()

    def _read_architecture(self) -> str:
        name = self._file.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            known = ", ".join(repr(known) for known in ARCHITECTURES)
            raise ModelError(f"{self.path}: architecture {name!r} is not supported (supported: {known})")
        return str(name)

    def _read_config(self) -> LlamaConfig:
        if self._integer("expert_count", 0):
            raise ModelError(f"{self.path}: mixture-of-experts models are not supported in GGUF files")
        rope = self._rope()
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelError(f"{self.path}: tensor 'token_embd.weight' is missing or no matrix")
        hidden, heads = self._integer("embedding_length"), self._integer("attention.head_count")
        layers, positions = self._integer("block_count"), self._integer("context_length")
        if layers > MAX_LAYERS:
            raise ModelError(f"{self.path}: impossible model shape: {layers} layers")
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
            attention_bias=self._prefix == "qwen2" or "blk.0.attn_q.bias" in self._file.tensors,
            output_bias="blk.0.attn_output.bias" in self._file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in self._file.tensors,
            qk_norm=self._prefix == "qwen3",
            window_tokens=window,
            sliding_layers=() if window is None else tuple(range(layers)),
        )
        if problem := config.problem():
            raise ModelError(f"{self.path}: impossible model shape: {problem}")
        if self._integer("rope.dimension_count", config.head_dim) != config.head_dim:
            raise ModelError(f"{self.path}: rotary embedding of a part of each head is not supported")
        return config

    def _rope(self) -> RopeSettings:
        theta, kind = self._number("rope.freq_base", 10000.0), self._value("rope.scaling.type", "none")
        divisors = self._rope_divisors()
        if kind == "linear" and divisors is None:
            return RopeSettings(theta, LinearScaling(max(self._number("rope.scaling.factor", 1.0), 1.0)))
        if kind != "none":
            raise ModelError(f"{self.path}: rope scaling {kind!r} is not supported in GGUF files")
        return RopeSettings(theta, frequency_divisors=divisors)

    def _window(self, positions: int) -> int | None:
        """Return the window of all layers; files whose window is of some layers only do not say of which."""
        window = self._integer("attention.sliding_window", 0)
        if window <= 0 or window >= positions:
            return None
        if self._prefix != "llama":
            raise ModelError(f"{self.path}: a sliding window is not supported in GGUF files of {self._prefix!r}")
        return window

    def _rope_divisors(self) -> tuple[float, ...] | None:
        entry = self._file.tensors.get(ROPE_DIVISORS)
        if entry is None:
            return None
        return tuple(decode(self._file.read(entry.name), entry.format, entry.shape).ravel().tolist())

    def _value(self, key: str, default: object) -> object:
        return self._file.metadata.get(f"{self._prefix}.{key}", default)

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int):
            raise ModelError(f"{self.path}: key '{self._prefix}.{key}' is missing or no integer")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, (int, float)):
            raise ModelError(f"{self.path}: key '{self._prefix}.{key}' is missing or no number")
        if not math.isfinite(value):
            raise ModelError(f"{self.path}: key '{self._prefix}.{key}' must be finite, not {value}")
        return float(value)

    def _read_text(self) -> TextFiles:
        metadata = self._file.metadata
        template = metadata.get("tokenizer.chat_template")
        bos_id = metadata.get("tokenizer.ggml.bos_token_id")
        try:
            tokenizer, add_bos = tokenizer_json(metadata), adds_bos(metadata)
        except ModelError as error:
            raise ModelError(f"{self.path}: {error}", hint=error.hint) from error
        return TextFiles(
            tokenizer=tokenizer,
            chat_template=template.encode() if isinstance(template, str) else None,
            bos_id=bos_id if isinstance(bos_id, int) else None,
            add_bos=add_bos and isinstance(bos_id, int),
            special_tokens=self._special_tokens(),
        )

    def _special_tokens(self) -> dict[str, str]:
        tokens = self._file.metadata.get("tokenizer.ggml.tokens")
        named: dict[str, str] = {}
        for hf_name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token_id = self._file.metadata.get(f"tokenizer.ggml.{key}_token_id")
            if isinstance(tokens, list) and isinstance(token_id, int) and 0 <= token_id < len(tokens):
                named[f"{hf_name}_token"] = str(tokens[token_id])
        return named


def _hf_name(name: str) -> str:
    """Return the Hugging Face name of a llama.cpp tensor; unknown names stay, and are refused as unused later."""
    if match := _LAYER_TENSOR.fullmatch(name):
        layer, part, suffix = match.groups()
        if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"
    part, _, suffix = name.rpartition(".")
    return f"{_TOP_NAMES[part]}.{suffix}" if part in _TOP_NAMES else name


def _rotate_half_order(values: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's row order of q and k, which interleaves the two halves of each head for its rotary kernel."""
    if values.shape[0] % (2 * heads):
        return values  # a wrong shape: the loader names it
    return values.view(heads, values.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(values.shape)
