"""Shape of a dense decoder, independent of where it was read from. Knows no files and no tensors.

Llama, Mistral, Qwen2 and Qwen3 are the same layers with other switches: those below.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.layers.rope_settings import RopeSettings

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Those that this shape describes, by Hugging Face's names."""

MAX_LAYERS = 4096
MAX_HEAD_DIM = 2**16
MAX_SIZE = 2**31 - 1
"""Far above any model. What a damaged or hostile file claims is refused before memory is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """`attention_bias` is of query, key and value, `output_bias` of the projection behind them. With `qk_norm` every
    head of query and key is normed before it is rotated. `sliding_layers` see `window_tokens` tokens, themselves
    included; the others see all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    max_positions: int
    rope: RopeSettings
    tied_embeddings: bool
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window_tokens: int | None = None
    sliding_layers: tuple[int, ...] = ()

    def problem(self) -> str | None:
        """Return what makes this configuration impossible, in words, or None."""
        sizes = (self.vocab_size, self.hidden_size, self.intermediate_size, self.layers, self.heads, self.kv_heads)
        if min(*sizes, self.head_dim, self.max_positions) < 1:
            return "a size is not positive"
        if max(*sizes, self.max_positions) > MAX_SIZE or self.layers > MAX_LAYERS or self.head_dim > MAX_HEAD_DIM:
            return "a size is out of range"
        if self.heads % self.kv_heads:
            return f"{self.heads} query heads are not a multiple of {self.kv_heads} key/value heads"
        if self.head_dim % 2:
            return f"head_dim {self.head_dim} is odd"
        if self.rms_eps <= 0 or self.rope.theta <= 0:
            return "rms_norm_eps and rope_theta must be positive"
        if self.sliding_layers and (self.window_tokens is None or self.window_tokens < 1):
            return f"sliding layers need a window, not {self.window_tokens}"
        divisors = self.rope.frequency_divisors
        if divisors is not None and (len(divisors) != self.head_dim // 2 or min(divisors) <= 0):
            return f"rope frequencies must be {self.head_dim // 2} positive numbers"
        return None
