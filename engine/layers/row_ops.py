"""The operators a decoder layer is made of, in two sets: the fastest, and one whose rows are bitwise independent.

Row-independent means that a token's result does not depend on which tokens, or how many, share the step. Libraries
choose another kernel by the number of rows, and vectorised loops treat the tail of a buffer differently, so the
CPU's invariant set gives every call the same shape (tiles of `TILE_ROWS` rows) and uses only operators without such
tails; on a GPU both sets are this package's kernels. Which set holds on a machine is not taken on trust:
`check_row_independence` runs at start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import WeightFormat
from engine.errors import ConfigError
from engine.layers import fp8, packed
from engine.protocol import Numerics

FEW_ROWS = 32
"""So many rows are faster through our product, which is chained to the kernels around it; measured on an H200."""

TILE_ROWS = 16
"""Rows of every matrix product in the invariant set; results of a row do not depend on its place in the tile."""


Fp8Linear = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class RowOps:
    """linear(x, weight, bias), silu_and_mul([gate | up]) and rms_norm(x, weight, eps), each over the last dimension.

    add_rms_norm(x, residual, weight, eps) adds x to `residual` in place and returns the norm of the sum. `pack` turns a
    filled weight [out, in] into what `linear` reads fastest; `linear` takes it both ways. With `fp8_linear`(x, weight,
    scales, bias) the layers' weights are of 8 bits (engine/layers/fp8.py), embeddings and the head are not.
    """

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    pack: Callable[[Tensor], Tensor]
    fp8_linear: Fp8Linear | None = None


def row_ops(numerics: Numerics, device: torch.device, weights: WeightFormat = "dtype") -> RowOps:
    """Return the operators of a numerics mode; a mode that the device does not have is an error, never another mode."""
    ops = _row_ops(numerics, device)
    return ops if weights != "fp8" else replace(ops, fp8_linear=_fp8_linear(numerics, device))


def _row_ops(numerics: Numerics, device: torch.device) -> RowOps:
    if device.type == "cuda":
        return kernel_ops(numerics)
    if numerics == "default":
        linear, pack = (packed.linear, packed.pack) if device.type == "cpu" else (F.linear, _as_it_is)
        return RowOps(linear, _silu_and_mul, _rms_norm, _add_rms_norm, pack)
    if device.type != "cpu":
        raise ConfigError(
            f"numerics 'invariant' is not available on device '{device.type}'",
            hint="Use --device cpu, or --numerics default.",
        )
    return RowOps(_linear_in_tiles, _silu_and_mul_by_exp, _rms_norm, _add_rms_norm, _as_it_is)


def kernel_ops(numerics: Numerics) -> RowOps:
    """Return the operators of a GPU. They need triton, as its attention back ends do."""
    from engine.kernels.activation import silu_and_mul
    from engine.kernels.linear import linear
    from engine.kernels.norm import add_rms_norm, rms_norm

    def library_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias) if x.shape[0] <= FEW_ROWS else F.linear(x, weight, bias)

    return RowOps(library_linear if numerics == "default" else linear, silu_and_mul, rms_norm, add_rms_norm, _as_it_is)


def _fp8_linear(numerics: Numerics, device: torch.device) -> Fp8Linear:
    if device.type == "cuda" and computes_fp8(device):
        return _fp8_kernels(numerics)
    if numerics == "default":
        return _fp8_linear_as_on_gpus if device.type == "cpu" else fp8.linear
    if device.type != "cpu":
        raise ConfigError(
            "weights 'fp8' with numerics 'invariant' need a GPU of compute capability 8.9 or more",
            hint="Use --numerics default or --weights dtype.",
        )
    return lambda x, weight, scales, bias: _in_tiles(partial(fp8.linear, weight=weight, scales=scales, bias=bias), x)


def computes_fp8(device: torch.device) -> bool:
    from engine.kernels.fp8 import FIRST_CAPABILITY

    return torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def _fp8_kernels(numerics: Numerics) -> Fp8Linear:
    from engine.kernels.fp8 import library_linear, library_takes
    from engine.kernels.linear import linear

    def library(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        # Also for few rows: on an H200 a step of 8B took 4.0 to 4.3 ms for 1 to 32 rows, 5.5 to 6.1 with our product.
        if not library_takes(weight):
            return linear(x, weight, bias, scales=scales)
        return library_linear(x, weight, scales, bias)

    def one_kernel(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias, scales=scales)

    return library if numerics == "default" else one_kernel


def _fp8_linear_as_on_gpus(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Tokens are rounded to 8 bits as well, like a GPU's: what that costs can be measured on a CPU."""
    return fp8.linear_of_fp8_tokens(x, weight, scales, bias)


def check_row_independence(ops: RowOps, weights: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Prove on this machine that products with rows of `dtype` are row-independent for every distinct shape and type of
    weight, or raise."""
    generator = torch.Generator().manual_seed(0)
    for weight in {(tuple(weight.shape), weight.dtype): weight for weight in weights}.values():
        rows = torch.randn(TILE_ROWS, weight.shape[1], generator=generator).to(weight.device, dtype)
        product = partial(_product, ops, weight)
        check_product(product, rows, f"a {tuple(weight.shape)} {weight.dtype}")


def check_product(product: Callable[[Tensor], Tensor], rows: Tensor, matrix: str) -> None:
    """Compute the rows together, in other places and alone; raise ConfigError unless they are the same."""
    together = product(rows)
    moved = product(rows.roll(5, dims=0)).roll(-5, dims=0)
    alone = product(rows[:1])
    if not (torch.equal(together, moved) and torch.equal(together[:1], alone)):
        raise ConfigError(
            f"numerics 'invariant' does not hold on this machine: products with {matrix} matrix depend on the batch",
            hint="Use --numerics default, or another --dtype or --threads.",
        )


def _product(ops: RowOps, weight: Tensor, x: Tensor) -> Tensor:
    if ops.fp8_linear is not None and weight.dtype == fp8.FP8:
        return ops.fp8_linear(x, weight, torch.ones(len(weight), device=x.device), None)
    return ops.linear(x, weight, None)


def _as_it_is(weight: Tensor) -> Tensor:
    return weight


def _silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _silu_and_mul_by_exp(gate_up: Tensor) -> Tensor:
    # F.silu's vectorised loop falls back to a scalar exp with other last bits at a buffer's end, which moves with the
    # number of rows. torch.exp has one implementation for whole and partial vectors; the rest is exact IEEE.
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (torch.exp(-gate) + 1.0) * up).to(gate_up.dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms_norm(residual.add_(x), weight, eps)


def _linear_in_tiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _in_tiles(partial(F.linear, weight=weight, bias=bias), x)


def _in_tiles(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call `product` with exactly TILE_ROWS rows of x [rows, in] at a time."""
    rows = x.shape[0]
    padded = x.new_zeros(-(-rows // TILE_ROWS) * TILE_ROWS, x.shape[1])
    padded[:rows] = x
    tiles = [product(tile) for tile in torch.split(padded, TILE_ROWS)]
    return (torch.cat(tiles) if len(tiles) > 1 else tiles[0])[:rows]
