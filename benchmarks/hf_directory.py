"""Writes any model that the engine opens as a Hugging Face directory, for servers that read no GGUF file.

    python -m benchmarks.hf_directory MODEL DIRECTORY [--dtype bfloat16]

The weights are the loader's own values, rounded to `dtype`; tokenizer, template and special tokens are those that the
engine uses. So another server computes with the same numbers and the same token ids. Models with rope scaling are
refused: their spellings in config.json are many.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.errors import HeadraceError, ModelError
from engine.loader.checkpoint import Checkpoint, TextFiles
from engine.loader.load import open_checkpoint
from engine.models.llama_config import LlamaConfig

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def write_hf_directory(model: str, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json, model.safetensors and the text files into `directory`. Raises ModelError."""
    checkpoint = open_checkpoint(model)
    try:
        config = _config(checkpoint, dtype)
        directory.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()  # of no use here, but a part of reading
        tensors = {name: checkpoint.read(name, digest).to(dtype).contiguous() for name in checkpoint.tensor_names}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        _write_json(directory / "config.json", config)
        _write_text(directory, checkpoint.text)
    finally:
        checkpoint.close()


def _config(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, object]:
    config = checkpoint.config
    if config.rope.scaling is not None or config.rope.frequency_divisors is not None:
        raise ModelError(f"{checkpoint.path}: models with rope scaling are not written")
    eos_ids = list(checkpoint.eos_ids)
    return {
        "architectures": [checkpoint.architecture],
        "model_type": MODEL_TYPES[checkpoint.architecture],
        "torch_dtype": str(dtype).removeprefix("torch."),
        "hidden_act": "silu",
        "bos_token_id": checkpoint.text.bos_id,
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids,
        **_shape(config),
    }


def _shape(config: LlamaConfig) -> dict[str, object]:
    shape: dict[str, object] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_eps,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }
    if config.window_tokens is not None:
        first = min(config.sliding_layers)
        shape |= {"sliding_window": config.window_tokens, "use_sliding_window": True, "max_window_layers": first}
    return shape


def _write_text(directory: Path, text: TextFiles) -> None:
    (directory / "tokenizer.json").write_bytes(text.tokenizer)
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": text.add_bos,
        "clean_up_tokenization_spaces": False,
        **text.special_tokens,
    }
    if text.chat_template is not None:
        settings["chat_template"] = text.chat_template.decode()
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    arguments = parser.parse_args()
    try:
        write_hf_directory(arguments.model, arguments.directory, getattr(torch, arguments.dtype))
    except HeadraceError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
