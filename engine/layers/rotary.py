"""Rotary position embedding (Su et al., RoFormer), rotate-half form, as tables over absolute positions.

Tables are float32 whatever the model's dtype: rounding an angle's cosine to bfloat16 would cost more than the whole
rotation gains. Every operator here is exact element by element, so rotation is row-independent in both numerics modes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.layers.rope_settings import LinearScaling, Llama3Scaling, RopeSettings, YarnScaling


def inverse_frequencies(head_dim: int, rope: RopeSettings) -> Tensor:
    """Return float32 [head_dim / 2]: radians per position of each pair."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.frequency_divisors is not None:
        return frequencies / torch.tensor(rope.frequency_divisors, dtype=torch.float32)
    if isinstance(rope.scaling, Llama3Scaling):
        return _llama3_frequencies(frequencies, rope.scaling)
    if isinstance(rope.scaling, YarnScaling):
        return _yarn_frequencies(frequencies, rope.theta, rope.scaling)
    if isinstance(rope.scaling, LinearScaling):
        return frequencies / rope.scaling.factor
    return frequencies


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, and blend in between."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_max_position / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _yarn_frequencies(frequencies: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Blend along a ramp over the pairs, between those that turn `beta_fast` and `beta_slow` times in the window."""
    pairs = len(frequencies)

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(scaling.original_max_position / (times * 2 * math.pi)) / math.log(theta)

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    width = high - low if high != low else 0.001
    divided = ((torch.arange(pairs, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / scaling.factor * divided + frequencies * (1 - divided)


class RotaryTables:
    """cos and sin of all positions up to the model's length, laid out so that a rotation is two products and a sum.

    Both are float32 [positions, head_dim]; the sine's first half is negated.
    """

    def __init__(self, head_dim: int, max_positions: int, rope: RopeSettings, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_positions).float(), inverse_frequencies(head_dim, rope))
        cos, sin = angles.cos(), angles.sin()
        if isinstance(rope.scaling, YarnScaling):
            cos, sin = cos * rope.scaling.attention_factor, sin * rope.scaling.attention_factor
        self._half = head_dim // 2
        self.cos = torch.cat((cos, cos), dim=-1).to(device)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin, each float32 [tokens, 1, head_dim]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [tokens, heads, head_dim]; the product is taken in float32 and rounded once."""
        return (x * cos + x.roll(self._half, dims=-1) * sin).to(x.dtype)
