"""What another server's model looks like from here: it cannot say most of it itself."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from engine.protocol import AssetRef, EngineInfo, KVGroupSpec, TextAssets

NO_TEXT = TextAssets(tokenizer=AssetRef("", 0))
"""Of a server that is only ever asked for text."""


def foreign_info(
    model: str,
    dialect: str,
    text: TextAssets,
    *,
    max_model_len: int,
    vocab_size: int,
    eos_ids: tuple[int, ...],
    weights: str | None = None,
    block_size: int = 64,
    dtype: str = "unknown",
    generation_defaults: Mapping[str, float | int] | None = None,
) -> EngineInfo:
    """Describe the model `model` of a server that speaks `dialect`.

    `weights` names what it has loaded (a repository's revision, say): two servers with equal names may continue each
    other's requests. Nothing verifies it, so it never equals the digest of an engine that has hashed its weights.
    """
    digest = hashlib.sha256(f"unverified/{dialect}/{weights or model}".encode()).hexdigest()
    return EngineInfo(
        model=model,
        incarnation="foreign",
        weights_digest=f"unverified-{digest}",
        architecture="unknown",
        dtype=dtype,
        device="foreign",
        numerics="default",
        operators=dialect,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        block_size=block_size,
        kv_groups=(KVGroupSpec(),),
        kv_capacity_tokens=max_model_len,  # whatever it is, one sequence of the window's length fits
        max_running=0,
        text=text,
        generation_defaults=dict(generation_defaults or {}),
    )
