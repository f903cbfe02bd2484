"""Rotary position embedding (Su et al., RoFormer), rotate-half form, as tables over absolute positions.

Tables are float32 whatever the model's dtype: rounding an angle's cosine to bfloat16 would cost more than the whole
rotation gains. Every operator here is exact element by element, so rotation is row-independent in both numerics modes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretch of low frequencies, by the names of its configuration."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """`frequency_divisors` (one per pair of dimensions) are how GGUF files carry any scaling."""

    theta: float
    scaling: Llama3Scaling | None = None
    frequency_divisors: tuple[float, ...] | None = None


def inverse_frequencies(head_dim: int, rope: RopeSettings) -> Tensor:
    """Return float32 [head_dim / 2]: radians per position of each pair."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.frequency_divisors is not None:
        return frequencies / torch.tensor(rope.frequency_divisors, dtype=torch.float32)
    if rope.scaling is not None:
        return _llama3_frequencies(frequencies, rope.scaling)
    return frequencies


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, and blend in between."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_max_position / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


class RotaryTables:
    """cos and sin of all positions up to the model's length, laid out so that a rotation is two products and a sum."""

    def __init__(self, head_dim: int, max_positions: int, rope: RopeSettings, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_positions).float(), inverse_frequencies(head_dim, rope))
        cos, sin = angles.cos(), angles.sin()
        self._half = head_dim // 2
        self._cos = torch.cat((cos, cos), dim=-1).to(device)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin, each float32 [tokens, 1, head_dim]."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [tokens, heads, head_dim]; the product is taken in float32 and rounded once."""
        return (x * cos + x.roll(self._half, dims=-1) * sin).to(x.dtype)
