"""Weights of 8 bits through the kernels, against products of the numbers that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.fp8 import library_takes, quantise_rows
from engine.kernels.linear import LinearTiles, linear
from engine.layers import fp8

SMALL = LinearTiles(tile_n=64, tile_t=16, tile_k=64, warps=4, stages=2)


def weight_of(n: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows whose magnitudes are orders apart, as the channels of real weights are."""
    spread = torch.logspace(-3, 1, n, device=device)[:, None]
    return fp8.quantise_rows(torch.randn(n, k, device=device) * spread)


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_product_is_of_what_the_weight_stands_for(
    device: torch.device, tokens: int, bias: bool, dtype: torch.dtype
) -> None:
    values, scales = weight_of(100, 530, device)
    x = torch.randn(tokens, 530, device=device).to(dtype)
    b = torch.randn(100, device=device).to(dtype) if bias else None
    found = linear(x, values, b, scales=scales)
    expected = x.double() @ fp8.Fp8Rows(values, scales).to_dense().double().T
    expected = expected if b is None else expected + b.double()
    error = (found.double() - expected).norm(dim=0) / expected.norm(dim=0)
    assert found.dtype == dtype
    assert error.max() < (1e-5 if dtype == torch.float32 else 1e-3)


def test_a_tokens_result_does_not_depend_on_the_others(device: torch.device) -> None:
    values, scales = weight_of(64, 600, device)
    x = torch.randn(40, 600, device=device)
    together = linear(x, values, tiles=SMALL, scales=scales)
    for tokens in (1, 7, 17):
        assert torch.equal(linear(x[:tokens], values, tiles=SMALL, scales=scales), together[:tokens])
    assert torch.equal(linear(x.flip(0), values, tiles=SMALL, scales=scales).flip(0), together)


def test_every_number_of_the_format_is_read_as_it_is(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(fp8.FP8)
    finite = codes[~codes.float().isnan()]
    values = torch.zeros(256, 64, device=device).to(fp8.FP8)
    values[: len(finite), 0] = finite
    x = torch.zeros(1, 64, device=device)
    x[0, 0] = 1.0
    found = linear(x, values, scales=torch.ones(256, device=device))
    assert torch.equal(found[0, : len(finite)], finite.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tokens_get_scales_of_their_own(device: torch.device, dtype: torch.dtype) -> None:
    """Numbers of the format times a power of two need no rounding, which Triton's interpreter does wrongly."""
    codes = torch.randint(0x7F, (5, 700), dtype=torch.uint8, device=device)
    codes[:, 60] = 0x7E  # 448, so that the scale is the power
    codes += 0x80 * torch.randint(2, codes.shape, dtype=torch.uint8, device=device)
    powers = torch.tensor([0.125, 1.0, 0.5, 4.0, 2.0], device=device)
    x = (codes.view(fp8.FP8).float() * powers[:, None]).to(dtype)[:, 50:650]
    values, scales = quantise_rows(x)
    assert torch.equal(scales, powers)
    assert torch.equal(values.float(), codes.view(fp8.FP8).float()[:, 50:650])


def test_a_token_of_zeros_stays_one(device: torch.device) -> None:
    values, scales = quantise_rows(torch.zeros(2, 64, device=device))
    assert torch.equal(values.float(), torch.zeros(2, 64, device=device))
    assert (scales > 0).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's interpreter rounds to e4m3 wrongly")
def test_tokens_are_rounded_as_torch_rounds_them(device: torch.device) -> None:
    x = torch.randn(64, 4096, device=device) * torch.logspace(-3, 2, 64, device=device)[:, None]
    (values, scales), (twin, twin_scales) = quantise_rows(x.bfloat16()), fp8.quantise_rows(x.bfloat16())
    torch.testing.assert_close(scales, twin_scales, rtol=1e-6, atol=0)
    # A quotient that lies between two numbers of the format may go to either.
    steps = values.view(torch.uint8).int() - twin.view(torch.uint8).int()
    assert steps.abs().max() <= 1
    assert (steps != 0).float().mean() < 0.01


def test_the_library_is_asked_for_shapes_that_it_takes() -> None:
    assert library_takes(torch.empty(64, 4096))
    assert not library_takes(torch.empty(64, 100))
    assert not library_takes(torch.empty(100, 64))
