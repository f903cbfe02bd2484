"""Weights and KV in 8 bits through a GPU's kernels, against float64 on the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine.attention.base import write_kv_by_index
from engine.attention.triton_backend import DEFAULT_TILES, INVARIANT_TILES, TritonAttention
from engine.kernels.fp8 import library_linear, quantise_rows
from engine.kernels.linear import linear
from engine.layers import fp8

WEIGHT_BOUND = 5e-3
"""Of the weight-only product: float32 sums, rounded once to bfloat16."""

TOKENS_BOUND = 5e-2
"""Of the library's: tokens are rounded to e4m3 as well, by up to 1/16 and by about 1/40 in the mean."""

LIBRARY_BOUND = 3e-2
"""Of the library's against the same rounded tokens: tensor cores add products of 8 bits with fewer bits than float32
has, and err by a part of 2^-13 or so at each of k / 32 additions."""

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
    _check_kv(check)


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


def _check_kv(check: Callable[[str, bool, str], None]) -> None:
    """Writing against torch's, bit by bit; attention over decode rows, chunks and long prompts."""
    from tests.support.paged import attend_in_float64, paged_case

    device = torch.device("cuda")
    query_lens, kv_lens = (1, 1, 7, 300, 1200), (65, 900, 700, 300, 2100)
    case = paged_case(
        query_lens, kv_lens, block_size=64, heads=8, kv_heads=2, head_dim=128, device=device, dtype=torch.bfloat16
    )
    small = replace(case, k_cache=case.k_cache.to(fp8.FP8), v_cache=case.v_cache.to(fp8.FP8))
    wide = replace(case, k_cache=small.k_cache.float(), v_cache=small.v_cache.float())
    for name, tiles in (("default", DEFAULT_TILES), ("invariant", INVARIANT_TILES)):
        for window in (None, 200):
            found = TritonAttention("checked", tiles).attend(
                small.query, small.k_cache, small.v_cache, small.batch, scale=128**-0.5, window_tokens=window
            )
            expected = attend_in_float64(wide, scale=128**-0.5, window_tokens=window)
            error = float((found.double() - expected).norm() / expected.norm())
            check(f"fp8 KV: attention, {name}, window {window}", error <= 1e-2, f"(error {error:.1e}, bound 1e-02)")
    key, value = (torch.randn(sum(query_lens), 2, 128, device=device).bfloat16() * 200 for _ in range(2))
    written, twins = (torch.zeros(2, *case.k_cache.shape, device=device).to(fp8.FP8) for _ in range(2))
    TritonAttention().write_kv(key, value, written[0], written[1], case.batch)
    write_kv_by_index(key, value, twins[0], twins[1], case.batch)
    differing = int((written.view(torch.uint8) != twins.view(torch.uint8)).sum())
    check("fp8 KV: written as torch rounds it", differing == 0, f"({differing} differ)")


def _bounded(check: Callable[[str, bool, str], None], name: str, found: Tensor, expected: Tensor, bound: float) -> None:
    """Compare the worst output channel's relative error: channels' magnitudes are orders apart."""
    error = float(((found.double() - expected).norm(dim=0) / expected.norm(dim=0)).max())
    check(name, error <= bound, f"(error {error:.1e}, bound {bound:.0e})")
