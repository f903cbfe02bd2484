"""What engines of tests say of themselves: one description, of which each test names what matters to it."""

from __future__ import annotations

from engine.protocol import AssetRef, EngineInfo, KVGroupSpec, TextAssets


def engine_info(**fields: object) -> EngineInfo:
    """Return the description of an engine that has neither a model nor text, with `fields` changed."""
    plain: dict[str, object] = {
        "model": "fake",
        "incarnation": "0",
        "weights_digest": "0" * 64,
        "architecture": "fake",
        "dtype": "float32",
        "device": "cpu",
        "numerics": "default",
        "operators": "none",
        "max_model_len": 256,
        "vocab_size": 1000,
        "eos_ids": (0,),
        "block_size": 64,
        "kv_groups": (KVGroupSpec(),),
        "kv_capacity_tokens": 10_000,
        "max_running": 64,
        "text": TextAssets(tokenizer=AssetRef("0", 0)),
    }
    return EngineInfo(**{**plain, **fields})  # type: ignore[arg-type]
