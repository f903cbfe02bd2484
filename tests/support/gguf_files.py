"""Writes a tiny Hugging Face directory as a GGUF file with the `gguf` package, as llama.cpp's converter lays it out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from engine.layers.rope_settings import Llama3Scaling, RopeSettings
from engine.layers.rotary import inverse_frequencies
from engine.text.byte_level import BYTE_OF
from tests.support.k_quants import quantise
from tests.support.tiny_models import CHAT_TEMPLATE

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    directory: Path,
    path: Path,
    architecture: str,
    *,
    weights: Sequence[GGMLQuantizationType] = (),
    sentencepiece: bool = False,
) -> dict[str, Tensor]:
    """Write `directory`'s model to `path`; return its tensors as the file holds them, by Hugging Face's names.

    `weights` are types that the matrices have in turn; norms and biases stay float32.
    """
    config = json.loads((directory / "config.json").read_text())
    writer = GGUFWriter(path, architecture)
    _write_shape(writer, config)
    _write_tokenizer(writer, directory, sentencepiece=sentencepiece)
    rope = config["rope_parameters"]
    if architecture == "llama" and rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(config["head_dim"], rope))
    stored, kinds = {}, cycle(weights)
    for name, tensor in load_file(directory / "model.safetensors").items():
        values = tensor.numpy()
        if weights and values.ndim == 2:
            kind = next(kinds)
            packed = quantise(_rows(values, name, config, architecture), kind)
            writer.add_tensor(_gguf_name(name), packed, raw_dtype=kind)
            values = gguf.quants.dequantize(quantise(values, kind), kind)
        else:
            writer.add_tensor(_gguf_name(name), _rows(values, name, config, architecture))
        stored[name] = torch.from_numpy(values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _write_shape(writer: GGUFWriter, config: dict[str, object]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def _write_tokenizer(writer: GGUFWriter, directory: Path, *, sentencepiece: bool) -> None:
    document = json.loads((directory / "tokenizer.json").read_text())
    vocab = document["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {token["id"] for token in document["added_tokens"]}
    kind = 6 if sentencepiece else 1
    if sentencepiece:
        tokens = [token if i in special else f"<0x{BYTE_OF[token]:02X}>" for i, token in enumerate(tokens)]
        writer.add_token_scores([0.0] * len(tokens))
    else:
        tokens[vocab["\u0106"]] = "th"  # in place of byte 6: the writer leaves out a list without merges
        writer.add_token_merges(["t h"])
    writer.add_tokenizer_model("llama" if sentencepiece else "gpt2")
    writer.add_tokenizer_pre("default" if sentencepiece else "gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else kind for i in range(len(tokens))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(3)
    writer.add_chat_template(CHAT_TEMPLATE)


def _gguf_name(name: str) -> str:
    part, _, suffix = name.rpartition(".")
    if part in TOP_NAMES:
        return f"{TOP_NAMES[part]}.{suffix}"
    _, _, layer, rest = part.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.{suffix}"


def _rows(values: NDArray[np.float32], name: str, config: dict[str, int], architecture: str) -> NDArray[np.float32]:
    """Order query's and key's rows in pairs for the llama architecture, whose rotation takes neighbours."""
    if architecture != "llama" or not (".q_proj." in name or ".k_proj." in name):
        return values
    heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
    shape = (heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(values.reshape(shape).swapaxes(1, 2).reshape(values.shape))


def _divisors(head_dim: int, rope: dict[str, float]) -> NDArray[np.float32]:
    scaling = Llama3Scaling(
        rope["factor"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        int(rope["original_max_position_embeddings"]),
    )
    plain, scaled = (
        inverse_frequencies(head_dim, RopeSettings(rope["rope_theta"], wanted)) for wanted in (None, scaling)
    )
    return (plain / scaled).numpy()
