"""Root-mean-square norm with a learned scale."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.layers.row_ops import RowOps


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, accumulated in float32."""

    def __init__(self, size: int, eps: float, *, ops: RowOps, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps
        self._rms_norm, self._add_rms_norm = ops.rms_norm, ops.add_rms_norm

    def forward(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to `residual` in place and return the norm of the sum."""
        return self._add_rms_norm(x, residual, self.weight, self.eps)
