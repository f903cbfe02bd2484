"""A linear layer whose arithmetic is the engine's numerics mode. Several projections of one input share one weight.

With operators for e4m3 the weight is of 8 bits from the start, with a scale for each output (engine/layers/fp8.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.layers.fp8 import FP8, Fp8Rows, WeightPart
from engine.layers.row_ops import RowOps


class Linear(nn.Module):
    """y = x W^T + b for x [tokens, in]. `out_sizes` are the parts' rows in W, e.g. (q, k, v): one product for all."""

    def __init__(
        self,
        in_size: int,
        out_sizes: tuple[int, ...],
        *,
        bias: bool,
        ops: RowOps,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        total = sum(out_sizes)
        self.out_sizes = out_sizes
        self._linear, self._fp8_linear, self._pack = ops.linear, ops.fp8_linear, ops.pack
        stored = dtype if ops.fp8_linear is None else FP8
        self.weight = nn.Parameter(torch.empty(total, in_size, dtype=stored, device=device), requires_grad=False)
        self.scales = None
        if stored == FP8:
            self.scales = nn.Parameter(torch.empty(total, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(total, dtype=dtype, device=device), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self._fp8_linear is not None and self.scales is not None:
            return self._fp8_linear(x, self.weight, self.scales, self.bias)
        return self._linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Give the weight the layout that the product reads fastest. It is filled, and stays as it is from here on."""
        if self.scales is None:
            self.weight = nn.Parameter(self._pack(self.weight.data), requires_grad=False)

    def named_parts(self, *names: str) -> list[tuple[str, WeightPart]]:
        """Return (checkpoint name, view to fill) of each part's weight and bias; `names` are in order of out_sizes.

        Of a packed weight they are copies.
        """
        parts: list[tuple[str, WeightPart]] = [
            (f"{name}.weight", part) for name, part in zip(names, self._weight_parts(), strict=True)
        ]
        if self.bias is not None:
            biases = torch.split(self.bias.data, list(self.out_sizes))
            parts += [(f"{name}.bias", bias) for name, bias in zip(names, biases, strict=True)]
        return parts

    def _weight_parts(self) -> list[WeightPart]:
        values = torch.split(values_of(self.weight), list(self.out_sizes))
        if self.scales is None:
            return list(values)
        scales = torch.split(self.scales.data, list(self.out_sizes))
        return [Fp8Rows(*rows) for rows in zip(values, scales, strict=True)]


def values_of(weight: Tensor) -> Tensor:
    """Return the values of a weight, packed or not."""
    return weight.to_dense() if weight.is_mkldnn else weight.data
