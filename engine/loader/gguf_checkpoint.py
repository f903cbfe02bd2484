"""A model in a GGUF file, seen as a checkpoint: llama.cpp's names and row order turned into Hugging Face's."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.loader.checkpoint import Digest
from engine.loader.gguf import GGUFFile
from engine.loader.gguf_blocks import decode
from engine.loader.gguf_config import ROPE_DIVISORS, GGUFConfig
from engine.loader.gguf_text import gguf_eos_ids, read_gguf_text

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


class GGUFCheckpoint:
    """Owns the open file. GGUF has no place for sampling defaults: who knows the model's gives them."""

    def __init__(self, path: Path, generation_defaults: Mapping[str, float | int] | None = None) -> None:
        self.path = path
        self.generation_defaults = dict(generation_defaults or {})
        self._file = GGUFFile(path)
        try:
            self._stored = {_hf_name(name): name for name in self._file.tensors if name != ROPE_DIVISORS}
            described = GGUFConfig(self._file)
            self._prefix, self.architecture = described.prefix, described.architecture
            self.config = described.read()
            self.eos_ids = gguf_eos_ids(self._file)
            self.text = read_gguf_text(self._file)
        except ModelError:
            self.close()
            raise

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
