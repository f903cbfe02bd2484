"""RMS norm in Triton, alone or with the residual addition before it. One program per row, sums in float32.

The width of the sum's tree comes from the row's length alone, so a row's result does not depend on the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.chain import chained, wait


@triton.jit
def _rms_norm_kernel(
    out, x, residual, weight, eps, stride_x, SIZE: tl.constexpr, WIDTH: tl.constexpr, CHAINED: tl.constexpr = False
):
    wait(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    mask = lane < SIZE
    values = tl.load(x + row * stride_x + lane, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + row * SIZE + lane, mask=mask, other=0.0).to(tl.float32)
        # The norm sees what the next layer will read: the sum after rounding.
        values = values.to(residual.dtype.element_ty)
        tl.store(residual + row * SIZE + lane, values, mask=mask)
        values = values.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / SIZE + eps)
    scaled = values * scale * tl.load(weight + lane, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + lane, scaled.to(out.dtype.element_ty), mask=mask)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    out = x.new_empty(x.shape)
    width = triton.next_power_of_2(size)
    if rows.shape[0] > 0:
        _rms_norm_kernel[(rows.shape[0],)](
            out,
            rows,
            residual,
            weight,
            eps,
            rows.stride(0),
            SIZE=size,
            WIDTH=width,
            num_warps=_warps(width),
            **chained(x.device),
        )
    return out


def _warps(width: int) -> int:
    """About 8 elements a thread: 16-byte accesses of a 2-byte type."""
    return min(max(width // 256, 1), 16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to `residual` in place and return the norm of the sum; residual is contiguous."""
    return _launch(x, residual, weight, eps)
