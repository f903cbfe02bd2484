"""Turns Hugging Face's JSON files into checked values. Knows their spellings across versions, and no tensors.

Anything that would change the model's results and is not implemented is refused by name; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Collection

from engine.errors import ModelError
from engine.loader.hf_rope import rope_settings, trained_positions
from engine.loader.json_file import JsonFile, shown
from engine.models.llama_config import MAX_LAYERS, LlamaConfig

_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

SAMPLING_DEFAULTS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}


def architecture_of(file: JsonFile, supported: Collection[str]) -> str:
    """Return the configuration's architecture, or raise naming what is supported."""
    names = file.values.get("architectures")
    name = names[0] if isinstance(names, list) and names else file.values.get("model_type")
    name = _BY_MODEL_TYPE.get(str(name), name)
    if name not in supported:
        raise ModelError(
            f"{file.path}: architecture {shown(name)} is not supported (supported: {', '.join(supported)})"
        )
    return str(name)


def decoder_config(file: JsonFile, architecture: str) -> LlamaConfig:
    """Read the configuration of one of the architectures in engine/models/registry.py."""
    _refuse_quantised(file)
    activation = file.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{file.path}: 'hidden_act' {shown(activation)} is not supported (supported: 'silu')")
    hidden, heads = file.integer("hidden_size"), file.integer("num_attention_heads")
    biased = file.flag("attention_bias", False)
    qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    window_tokens, sliding_layers = _sliding_layers(file, architecture)
    config = LlamaConfig(
        vocab_size=file.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=file.integer("intermediate_size"),
        layers=file.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=file.integer("num_key_value_heads", heads),
        head_dim=file.integer("head_dim", 128 if qwen3 else hidden // max(heads, 1)),
        rms_eps=file.number("rms_norm_eps", 1e-6),
        max_positions=trained_positions(file),
        rope=rope_settings(file),
        tied_embeddings=file.flag("tie_word_embeddings", False),
        attention_bias=qwen2 or biased,
        output_bias=biased and not qwen2,
        mlp_bias=file.flag("mlp_bias", False),
        qk_norm=qwen3,
        window_tokens=window_tokens,
        sliding_layers=sliding_layers,
    )
    if problem := config.problem():
        raise ModelError(f"{file.path}: impossible model shape: {problem}")
    return config


def _refuse_quantised(file: JsonFile) -> None:
    """Name the method: FP8, AWQ, GPTQ, bitsandbytes and others all say it in the same place."""
    found = file.values.get("quantization_config", file.values.get("compression_config"))
    if found is not None:
        method = found.get("quant_method", "unnamed") if isinstance(found, dict) else "unnamed"
        raise ModelError(
            f"{file.path}: weights quantised with {shown(method)} ('quantization_config') are not supported"
            " (supported: float32, float16, bfloat16; GGUF files with Q4_0 to Q8_0 and Q4_K to Q6_K)"
        )


def _sliding_layers(file: JsonFile, architecture: str) -> tuple[int | None, tuple[int, ...]]:
    """Return the window and the layers that have it. A window as long as the model's positions is none."""
    count, window = file.integer("num_hidden_layers"), file.values.get("sliding_window")
    if count > MAX_LAYERS:
        raise ModelError(f"{file.path}: impossible model shape: {count} layers")
    layers = range(count)
    if architecture == "MistralForCausalLM":
        sliding = tuple(layers)
        window = file.values.get("sliding_window", 4096)  # what a file means that does not say
    elif architecture == "LlamaForCausalLM" or not file.flag("use_sliding_window", False):
        return None, ()
    elif (kinds := file.values.get("layer_types")) is not None:
        if not isinstance(kinds, list) or len(kinds) != len(layers) or set(kinds) - _LAYER_TYPES:
            raise ModelError(
                f"{file.path}: 'layer_types' must name one of {', '.join(sorted(_LAYER_TYPES))} for each layer"
            )
        sliding = tuple(layer for layer in layers if kinds[layer] == "sliding_attention")
    else:
        sliding = tuple(layers[file.integer("max_window_layers", 28) :])
    if window is None or not sliding:
        return None, ()
    window_tokens = file.integer("sliding_window", 4096)
    return (None, ()) if window_tokens >= trained_positions(file) else (window_tokens, sliding)


def sampling_defaults(file: JsonFile) -> dict[str, float | int]:
    """Return the model's own sampling defaults by SamplingParams field name."""
    defaults: dict[str, float | int] = {}
    for key, kind in SAMPLING_DEFAULTS.items():
        if file.values.get(key) is not None:
            defaults[key] = file.integer(key) if kind is int else file.number(key)
    return defaults
