"""Products with weights in 8 bits on a GPU, against float64 on the numbers that the weights stand for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.kernels.fp8 import library_linear, quantise_rows
from engine.kernels.linear import linear
from engine.layers import fp8

WEIGHT_BOUND = 5e-3
"""Of the weight-only product: float32 sums, rounded once to bfloat16."""

TOKENS_BOUND = 5e-2
"""Of the library's: tokens are rounded to e4m3 as well, by up to 1/16 and by about 1/40 in the mean."""

LIBRARY_BOUND = 1e-2
"""Of the library's against the same rounded tokens: its sums are not those of float32."""

SHAPES = {"0.6B qkv": (4096, 1024), "0.6B down": (1024, 3072), "8B qkv": (6144, 4096), "8B down": (4096, 14336)}


def check_fp8_kernels(check: Callable[[str, bool, str], None]) -> None:
    """`check` takes a name, whether it passed, and a note."""
    for name, (n, k) in SHAPES.items():
        spread = torch.logspace(-2, 1, n, device="cuda")[:, None]
        values, scales = fp8.quantise_rows(torch.randn(n, k, device="cuda") * spread)
        exact_weight = fp8.Fp8Rows(values, scales).to_dense().double()
        x = torch.randn(600, k, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
        expected = x.double() @ exact_weight.T + bias.double()
        together = linear(x, values, bias, scales=scales)
        _bounded(check, f"fp8 {name}: weights alone", together, expected, WEIGHT_BOUND)
        differing = [
            tokens
            for tokens in (1, 16, 17, 32, 33, 64, 128, 256, 257)
            if not torch.equal(linear(x[:tokens], values, bias, scales=scales), together[:tokens])
        ]
        check(f"fp8 {name}: bitwise whatever the number of tokens", not differing, f"{differing or ''}")
        library = library_linear(x, values, scales, bias)
        _bounded(check, f"fp8 {name}: weights and tokens", library, expected, TOKENS_BOUND)
        rounded = fp8.Fp8Rows(*quantise_rows(x)).to_dense().double()
        _bounded(check, f"fp8 {name}: sums", library, rounded @ exact_weight.T + bias.double(), LIBRARY_BOUND)
    _check_rounding(check)


def _check_rounding(check: Callable[[str, bool, str], None]) -> None:
    """A quotient that lies between two numbers of the format may go to either."""
    x = (torch.randn(64, 4096, device="cuda") * torch.logspace(-3, 2, 64, device="cuda")[:, None]).bfloat16()
    (values, scales), (twin, twin_scales) = quantise_rows(x), fp8.quantise_rows(x)
    steps = (values.view(torch.uint8).int() - twin.view(torch.uint8).int()).abs()
    passed = int(steps.max()) <= 1 and float((steps > 0).float().mean()) < 0.01
    passed &= torch.allclose(scales, twin_scales, rtol=1e-6, atol=0)
    check(
        "fp8: tokens are rounded as torch rounds them", passed, f"({int((steps > 0).sum())} of {steps.numel()} differ)"
    )


def _bounded(check: Callable[[str, bool, str], None], name: str, found: Tensor, expected: Tensor, bound: float) -> None:
    """Compare the worst output channel's relative error: channels' magnitudes are orders apart."""
    error = float(((found.double() - expected).norm(dim=0) / expected.norm(dim=0)).max())
    check(name, error <= bound, f"(error {error:.1e}, bound {bound:.0e})")
