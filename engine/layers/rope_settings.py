"""What a model says of its rotary embedding. engine/layers/rotary.py makes angles of it; this needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretch of low frequencies, by the names of its configuration."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All positions divided by a factor (Chen et al., position interpolation)."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Peng et al., YaRN: frequencies that turn often in the original window stay, slow ones are divided, those between
    are blended. `attention_factor` scales cosine and sine, hence the logits by its square.
    """

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """`frequency_divisors` (one per pair of dimensions) are how GGUF files carry any scaling."""

    theta: float
    scaling: Llama3Scaling | LinearScaling | YarnScaling | None = None
    frequency_divisors: tuple[float, ...] | None = None
