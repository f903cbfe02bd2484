"""Shape of a Llama decoder, independent of where it was read from. Knows no files and no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from engine.layers.rotary import RopeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
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
    mlp_bias: bool = False

    def problem(self) -> str | None:
        """Return what makes this configuration impossible, in words, or None."""
        sizes = (self.vocab_size, self.hidden_size, self.intermediate_size, self.layers, self.heads, self.kv_heads)
        if min(*sizes, self.head_dim, self.max_positions) < 1:
            return "a size is not positive"
        if self.heads % self.kv_heads:
            return f"{self.heads} query heads are not a multiple of {self.kv_heads} key/value heads"
        if self.head_dim % 2:
            return f"head_dim {self.head_dim} is odd"
        if self.rms_eps <= 0 or self.rope.theta <= 0:
            return "rms_norm_eps and rope_theta must be positive"
        divisors = self.rope.frequency_divisors
        if divisors is not None and (len(divisors) != self.head_dim // 2 or min(divisors) <= 0):
            return f"rope frequencies must be {self.head_dim // 2} positive numbers"
        return None
