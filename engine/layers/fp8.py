"""Numbers of 8 bits with a floating point (e4m3), and a float32 scale for each row of them.

A row's largest magnitude becomes the largest number of the format, so a row keeps its own range: of a weight that is an
output channel, of activations a token. Products here are torch's, on numbers that are widened for the occasion: right
everywhere and slow. A GPU that computes with e4m3 has its own (engine/kernels/fp8.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn

LARGEST = torch.finfo(FP8).max

SMALLEST_RANGE = 1e-30
"""The largest magnitude that a row of zeros is taken to have: its scale must not be 0."""


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Views of a weight's rows: values e4m3 [rows, k] and scales float32 [rows]. They are filled like a tensor."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def copy_(self, source: Tensor) -> None:
        """Quantise `source` [rows, k] into this memory, on this device."""
        values, scales = quantise_rows(source.to(self.values.device))
        self.values.copy_(values)
        self.scales.copy_(scales)

    def to_dense(self) -> Tensor:
        """Return what the rows stand for, float32."""
        return self.values.float() * self.scales[:, None]


WeightPart = Tensor | Fp8Rows
"""A checkpoint's tensor in a module: it has a shape, `copy_` fills it and `to_dense` gives its values."""


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 [rows, k] and scales float32 [rows] for x [rows, k]; their product is x within 1/16 of a number, or
    within 2^-10 of its row's scale where that is more."""
    wide = x.float()
    scales = wide.abs().amax(dim=1).clamp(min=SMALLEST_RANGE) / LARGEST
    return rounded(wide / scales[:, None]), scales


def rounded(x: Tensor) -> Tensor:
    """Return x in e4m3 without a scale; what is too large becomes the largest number."""
    return x.clamp(-LARGEST, LARGEST).to(FP8)


def linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b in x's dtype, rounded once, for x [tokens, k], weight e4m3 [n, k] and scales [n]."""
    product = F.linear(x.float(), weight.float()) * scales
    return (product if bias is None else product + bias.float()).to(x.dtype)


def linear_of_fp8_tokens(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """As `linear`, with each token's activations rounded to e4m3 first."""
    values, token_scales = quantise_rows(x)
    return linear(Fp8Rows(values, token_scales).to_dense(), weight, scales, bias).to(x.dtype)
