"""Published shapes of which models with random weights are made: "random:llama-3.1-8b". Needs no torch."""

from __future__ import annotations

from engine.errors import ModelError
from engine.layers.rope_settings import RopeSettings
from engine.models.llama_config import LlamaConfig

RANDOM_PREFIX = "random:"


def _llama(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, *, tied: bool = True
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=1e-6,
        max_positions=131072,
        rope=RopeSettings(theta=1e6),
        tied_embeddings=tied,
    )


SHAPES = {
    "tiny": _llama(512, 64, 128, 2, 4, 2, 16),
    "smollm2-135m": _llama(49152, 576, 1536, 30, 9, 3, 64),
    "qwen3-0.6b": _llama(151936, 1024, 3072, 28, 16, 8, 128),
    "llama-3.1-8b": _llama(128256, 4096, 14336, 32, 32, 8, 128, tied=False),
}


def shape_named(name: str) -> LlamaConfig:
    """Return a published shape. Raises ModelError."""
    if name not in SHAPES:
        raise ModelError(f"no random model is called {name!r} (there are: {', '.join(SHAPES)})")
    return SHAPES[name]
