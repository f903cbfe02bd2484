"""Matrix products on a CPU with weights that oneDNN has laid out for itself once, instead of in every call.

A packed weight is a tensor of its own layout: `to_dense` gives the values back, nothing else reads them. Rows are not
independent of each other's number, so the invariant set does without it.

Where a processor multiplies float32 faster than bfloat16, products of many rows are taken in float32, with the weight
converted for the occasion. The factors are the same numbers and sums are float32 either way.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

WIDE_ROWS = 256
"""So many rows pay for a weight's conversion; measured, they break even at about 130."""

_TRIAL_SHAPE = (64, 96)


def pack(weight: Tensor) -> Tensor:
    """Return [out, in] in oneDNN's layout, or as it is where `packing_works` says no for its dtype."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None) if packing_works(weight.dtype) else weight
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As F.linear, for a weight from `pack`."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    if x.dtype == torch.bfloat16 and x.shape[0] >= WIDE_ROWS and multiplies_bfloat16_slowly():
        return linear_in_float32(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def linear_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product in float32, rounded once to x's dtype."""
    wide = F.linear(x.float(), weight.to_dense(torch.float32), None if bias is None else bias.float())
    return wide.to(x.dtype)


@cache
def multiplies_bfloat16_slowly(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Intel's AVX512 has one bfloat16 product where it has two of float32: its matrix unit was to take them over. Many
    virtual machines hide that unit. A rule and not a measurement, so that a machine computes the same at every start.
    """
    try:
        fields = dict(line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
    except OSError:
        return False
    known = {name.strip(): value.split() for name, value in fields.items()}
    flags = known.get("flags", [])
    return known.get("vendor_id") == ["GenuineIntel"] and "avx512_bf16" in flags and "amx_bf16" not in flags


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
