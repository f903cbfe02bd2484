"""The gated feed-forward block: down(silu(gate(x)) * up(x)), gate and up as one product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.layers.fp8 import WeightPart
from engine.layers.linear import Linear
from engine.layers.row_ops import RowOps


class GatedMLP(nn.Module):
    def __init__(
        self, size: int, inner_size: int, *, bias: bool, ops: RowOps, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.gate_up = Linear(size, (inner_size, inner_size), bias=bias, ops=ops, dtype=dtype, device=device)
        self.down = Linear(inner_size, (size,), bias=bias, ops=ops, dtype=dtype, device=device)
        self._silu_and_mul = ops.silu_and_mul

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self._silu_and_mul(self.gate_up(x)))
        return output

    def named_parts(self, prefix: str) -> list[tuple[str, WeightPart]]:
        return [
            *self.gate_up.named_parts(f"{prefix}.gate_proj", f"{prefix}.up_proj"),
            *self.down.named_parts(f"{prefix}.down_proj"),
        ]
