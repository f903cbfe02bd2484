"""Activations in e4m3 on GPUs that compute with it (compute capability 8.9 up), and the library's product of them.

Both factors are of 8 bits with a scale for each row (engine/layers/fp8.py), so many tokens take half the time of 16
bits. For the bitwise mode `engine.kernels.linear` widens the weight as it reads it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.chain import chained, wait
from engine.layers.fp8 import FP8, LARGEST, SMALLEST_RANGE

FIRST_CAPABILITY = (8, 9)

_GRAIN = 16
"""The library wants both sizes of a weight to be multiples of it."""


@triton.jit
def _quantise_rows_kernel(
    values,
    scales,
    x,
    stride_x,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_RANGE: tl.constexpr,
    CHAINED: tl.constexpr = False,
):
    """One program per row."""
    wait(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    mask = lane < SIZE
    wide = tl.load(x + row * stride_x + lane, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 0), SMALLEST_RANGE) / LARGEST
    tl.store(scales + row, scale)
    tl.store(values + row * SIZE + lane, (wide / scale).to(tl.float8e4nv), mask=mask)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 [rows, k] and scales float32 [rows] for x [rows, k], whose rows may be strided."""
    rows, size = x.shape
    values, scales = x.new_empty((rows, size), dtype=FP8), x.new_empty(rows, dtype=torch.float32)
    width = triton.next_power_of_2(size)
    if rows > 0:
        _quantise_rows_kernel[(rows,)](
            values,
            scales,
            x,
            x.stride(0),
            SIZE=size,
            WIDTH=width,
            LARGEST=LARGEST,
            SMALLEST_RANGE=SMALLEST_RANGE,
            num_warps=min(max(width // 512, 1), 16),
            **chained(x.device),
        )
    return values, scales


def library_takes(weight: Tensor) -> bool:
    return all(size % _GRAIN == 0 for size in weight.shape)


def library_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return bfloat16 [tokens, n] for x bfloat16 [tokens, k], weight e4m3 [n, k] and scales float32 [n]."""
    values, token_scales = quantise_rows(x)
    product = torch._scaled_mm(
        values,
        weight.t(),
        scale_a=token_scales[:, None],
        scale_b=scales[None, :],
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
    return product if bias is None else product.add_(bias)
