"""A linear layer whose arithmetic is the engine's numerics mode. Several projections of one input share one weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
        self.weight = nn.Parameter(torch.empty(total, in_size, dtype=dtype, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(total, dtype=dtype, device=device), requires_grad=False) if bias else None
        self._linear, self._pack = ops.linear, ops.pack

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Give the weight the layout that the product reads fastest. It is filled, and stays as it is from here on."""
        self.weight = nn.Parameter(self._pack(self.weight.data), requires_grad=False)

    def named_parts(self, *names: str) -> list[tuple[str, Tensor]]:
        """Return (checkpoint name, view to fill) of each part's weight and bias; `names` are in order of out_sizes.

        Of a packed weight they are copies.
        """
        parts = []
        for tensor, suffix in ((self.weight, "weight"), (self.bias, "bias")):
            if tensor is not None:
                views = torch.split(values_of(tensor), list(self.out_sizes))
                parts += [(f"{name}.{suffix}", view) for name, view in zip(names, views, strict=True)]
        return parts


def values_of(weight: Tensor) -> Tensor:
    """Return the values of a weight, packed or not."""
    return weight.to_dense() if weight.is_mkldnn else weight.data
