"""What another server's model looks like from here: it cannot say most of it itself."""

from __future__ import annotations

import hashlib

from engine.protocol import EngineInfo, KVGroupSpec, TextAssets


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
        kv_capacity_tokens=0,
        max_running=0,
        text=text,
    )
