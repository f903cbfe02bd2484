"""silu(gate) * up in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.chain import chained, wait

_TILE = 1024


@triton.jit
def _silu_and_mul_kernel(
    out, gate_up, stride_row, SIZE: tl.constexpr, TILE: tl.constexpr, CHAINED: tl.constexpr = False
):
    wait(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = lane < SIZE
    gate = tl.load(gate_up + row * stride_row + lane, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride_row + SIZE + lane, mask=mask, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * SIZE + lane, product.to(out.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [tokens, size] for [gate | up] [tokens, 2 * size]; rounded once."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, size)
    if tokens > 0:
        grid = (tokens, triton.cdiv(size, _TILE))
        _silu_and_mul_kernel[grid](out, gate_up, gate_up.stride(0), SIZE=size, TILE=_TILE, **chained(gate_up.device))
    return out
