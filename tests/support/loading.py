"""Loads models for tests, each once per process and dtype."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from engine.config import EngineConfig
from engine.loader.load import LoadedModel, load_model
from engine.loader.packaged import ensure


def load(
    model: Path,
    dtype: str = "float32",
    numerics: str = "default",
    max_model_len: int = 512,
    operators: str = "auto",
    weights: str = "dtype",
    kv_dtype: str = "dtype",
) -> LoadedModel:
    config = EngineConfig(
        model=str(model),
        dtype=dtype,  # type: ignore[arg-type]
        numerics=numerics,  # type: ignore[arg-type]
        device="cpu",
        operators=operators,  # type: ignore[arg-type]
        weights=weights,  # type: ignore[arg-type]
        kv_dtype=kv_dtype,  # type: ignore[arg-type]
        max_model_len=max_model_len,
    )
    return load_model(config, lambda fraction, phase: None)


@cache
def smollm2(dtype: str = "float32", numerics: str = "default") -> LoadedModel:
    return load(ensure("smollm2"), dtype, numerics)
