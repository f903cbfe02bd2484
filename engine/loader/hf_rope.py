"""Rotary settings in a Hugging Face configuration: where they stand in which version, and which kinds there are.

Whatever changes the angles and is not implemented is refused by name.
"""

from __future__ import annotations

import math

from engine.errors import ModelError
from engine.layers.rope_settings import LinearScaling, Llama3Scaling, RopeSettings, YarnScaling
from engine.loader.json_file import JsonFile, shown
from engine.models.llama_config import MAX_SIZE

KINDS = ("default", "linear", "llama3", "yarn")


def rope_settings(file: JsonFile) -> RopeSettings:
    """Newer files keep everything in rope_parameters, older ones rope_theta beside rope_scaling."""
    scaling = _scaling(file)
    theta = file.number("rope_theta", file.nested("rope_parameters").number("rope_theta", 10000.0))
    if scaling.number("partial_rotary_factor", file.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{file.path}: 'partial_rotary_factor' is not supported")
    kind = _kind(scaling)
    if kind == "default":
        return RopeSettings(theta)
    if kind not in KINDS:
        raise ModelError(f"{file.path}: rope type {shown(kind)} is not supported (supported: {', '.join(KINDS)})")
    if scaling.number("factor") < 1:
        raise ModelError(f"{file.path}: rope scaling factor {scaling.number('factor')} is below 1")
    if kind == "linear":
        return RopeSettings(theta, LinearScaling(scaling.number("factor")))
    return RopeSettings(theta, _llama3(scaling) if kind == "llama3" else _yarn(scaling, file))


def trained_positions(file: JsonFile) -> int:
    """Return the longest sequence the model is for. YaRN files may give the window before it was stretched."""
    positions = file.integer("max_position_embeddings", 2048)
    scaling = _scaling(file)
    if _kind(scaling) != "yarn":
        return positions
    original = scaling.integer("original_max_position_embeddings", positions)
    stretched = original * scaling.number("factor")
    if not abs(stretched) < MAX_SIZE:
        raise ModelError(f"{file.path}: rope scaling stretches {original} positions to {stretched:g}")
    return max(positions, int(stretched))


def _scaling(file: JsonFile) -> JsonFile:
    new, old = file.nested("rope_parameters"), file.nested("rope_scaling")
    return new if new.values else old


def _kind(scaling: JsonFile) -> object:
    return scaling.values.get("rope_type", scaling.values.get("type", "default"))


def _llama3(scaling: JsonFile) -> Llama3Scaling:
    llama3 = Llama3Scaling(
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position=scaling.integer("original_max_position_embeddings"),
    )
    if llama3.high_freq_factor == llama3.low_freq_factor or llama3.original_max_position < 1:
        raise ModelError(f"{scaling.path}: rope scaling is impossible: {llama3}")
    return llama3


def _yarn(scaling: JsonFile, file: JsonFile) -> YarnScaling:
    factor = scaling.number("factor")
    if scaling.values.get("mscale") or scaling.values.get("mscale_all_dim"):
        raise ModelError(f"{file.path}: rope type 'yarn' with 'mscale' is not supported")
    yarn = YarnScaling(
        factor=factor,
        original_max_position=scaling.integer(
            "original_max_position_embeddings", file.integer("max_position_embeddings", 2048)
        ),
        attention_factor=scaling.number("attention_factor", 0.1 * math.log(factor) + 1.0),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
    )
    if yarn.original_max_position < 1 or min(yarn.beta_slow, yarn.beta_fast, yarn.attention_factor) <= 0:
        raise ModelError(f"{file.path}: rope scaling is impossible: {yarn}")
    return yarn
