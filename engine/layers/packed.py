"""Matrix products on a CPU with weights that oneDNN has laid out for itself once, instead of in every call.

A packed weight is a tensor of its own layout: `to_dense` gives the values back, nothing else reads them. Rows are not
independent of each other's number, so the invariant set does without it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_TRIAL_SHAPE = (64, 96)


def pack(weight: Tensor) -> Tensor:
    """Return [out, in] in oneDNN's layout, or as it is where `packing_works` says no for its dtype."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None) if packing_works(weight.dtype) else weight
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As F.linear, for a weight from `pack`."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def packing_works(dtype: torch.dtype) -> bool:
    """Try it: which processors and builds of torch can do it with which dtype is written down nowhere."""
    if dtype not in _works:
        _works[dtype] = _try(dtype)
    return _works[dtype]


_works: dict[torch.dtype, bool] = {}


def _try(dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, _TRIAL_SHAPE[1], generator=generator).to(dtype) for rows in (_TRIAL_SHAPE[0], 3))
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        product = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        unpacked = packed.to_dense()
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    # Sums in another order differ by a rounding or two of the dtype.
    tolerance = 8 * torch.finfo(dtype).eps
    exact = x.double() @ weight.double().T
    error = (product.double() - exact).abs().max() / exact.abs().max()
    return torch.equal(unpacked, weight) and bool(error < tolerance)
