"""Turns Hugging Face's JSON files into checked values. Knows their spellings across versions, and no tensors.

Anything that would change the model's results and is not implemented is refused by name; nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelError
from engine.layers.rotary import Llama3Scaling, RopeSettings
from engine.models.llama_config import LlamaConfig

SAMPLING_DEFAULTS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}

_DIRECTORY = "It needs config.json, model.safetensors and tokenizer.json; a GGUF file is given by its own path."


@dataclass(frozen=True, slots=True)
class JsonFile:
    """A JSON object and the path it came from, for messages."""

    path: Path
    values: Mapping[str, object]

    @classmethod
    def read(cls, path: Path) -> JsonFile:
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            raise ModelError(f"{path}: missing file", hint=_DIRECTORY) from error
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelError(f"{path}: must hold a JSON object")
        return cls(path, values)

    @classmethod
    def read_optional(cls, path: Path) -> JsonFile:
        return cls.read(path) if path.exists() else cls(path, {})

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{self.path}: {key!r} must be an integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ModelError(f"{self.path}: {key!r} must be a number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: {key!r} must be true or false, not {value!r}")
        return value

    def nested(self, key: str) -> JsonFile:
        value = self.values.get(key)
        if value is None:
            return JsonFile(self.path, {})
        if not isinstance(value, dict):
            raise ModelError(f"{self.path}: {key!r} must be an object, not {value!r}")
        return JsonFile(self.path, value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return one id or a list of them as a tuple; absent is empty."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise ModelError(f"{self.path}: {key!r} must be a token id or a list of them, not {value!r}")
        return tuple(ids)


def architecture_of(file: JsonFile, supported: tuple[str, ...]) -> str:
    """Return the configuration's architecture, or raise naming what is supported."""
    names = file.values.get("architectures")
    name = names[0] if isinstance(names, list) and names else file.values.get("model_type")
    if name == "llama":
        name = "LlamaForCausalLM"
    if name not in supported:
        raise ModelError(f"{file.path}: architecture {name!r} is not supported (supported: {', '.join(supported)})")
    return str(name)


def llama_config(file: JsonFile) -> LlamaConfig:
    """Read the configuration of a LlamaForCausalLM."""
    if file.values.get("quantization_config") is not None:
        raise ModelError(f"{file.path}: 'quantization_config' is not supported (supported: float32, float16, bfloat16)")
    activation = file.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{file.path}: 'hidden_act' {activation!r} is not supported (supported: 'silu')")
    hidden, heads = file.integer("hidden_size"), file.integer("num_attention_heads")
    config = LlamaConfig(
        vocab_size=file.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=file.integer("intermediate_size"),
        layers=file.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=file.integer("num_key_value_heads", heads),
        head_dim=file.integer("head_dim", hidden // max(heads, 1)),
        rms_eps=file.number("rms_norm_eps", 1e-6),
        max_positions=file.integer("max_position_embeddings", 2048),
        rope=_rope(file),
        tied_embeddings=file.flag("tie_word_embeddings", False),
        attention_bias=file.flag("attention_bias", False),
        mlp_bias=file.flag("mlp_bias", False),
    )
    if problem := config.problem():
        raise ModelError(f"{file.path}: impossible model shape: {problem}")
    return config


def _rope(file: JsonFile) -> RopeSettings:
    """Newer files keep everything in rope_parameters, older ones rope_theta beside rope_scaling."""
    new, old = file.nested("rope_parameters"), file.nested("rope_scaling")
    scaling = new if new.values else old
    theta = file.number("rope_theta", new.number("rope_theta", 10000.0))
    if scaling.number("partial_rotary_factor", file.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{file.path}: 'partial_rotary_factor' is not supported")
    kind = scaling.values.get("rope_type", scaling.values.get("type", "default"))
    if kind == "default":
        return RopeSettings(theta)
    if kind != "llama3":
        raise ModelError(f"{file.path}: rope type {kind!r} is not supported (supported: 'default', 'llama3')")
    llama3 = Llama3Scaling(
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position=scaling.integer("original_max_position_embeddings"),
    )
    if llama3.factor <= 0 or llama3.high_freq_factor == llama3.low_freq_factor:
        raise ModelError(f"{file.path}: rope scaling is impossible: {llama3}")
    return RopeSettings(theta, llama3)


def sampling_defaults(file: JsonFile) -> dict[str, float | int]:
    """Return the model's own sampling defaults by SamplingParams field name."""
    defaults: dict[str, float | int] = {}
    for key, kind in SAMPLING_DEFAULTS.items():
        if file.values.get(key) is not None:
            defaults[key] = file.integer(key) if kind is int else file.number(key)
    return defaults
