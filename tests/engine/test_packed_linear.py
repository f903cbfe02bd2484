"""Weights in oneDNN's layout: the same values, the same products, and plain weights where the layout cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.layers import packed
from engine.models.llama import Llama
from tests.support.loading import load
from tests.support.tiny_models import write_tiny_llama

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (7, 3), (96, 64), (260, 100))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_weight_has_its_values_and_gives_the_same_products(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = (
        torch.randn(shape, generator=generator).to(dtype),
        torch.randn(shape[0], generator=generator).to(dtype),
    )
    ready = packed.pack(weight)
    assert ready.is_mkldnn == packed.packing_works(dtype)
    if ready.is_mkldnn:
        assert torch.equal(ready.to_dense(), weight)
    for rows in (0, 1, 2, 17, 130):
        x = torch.randn(rows, shape[1], generator=generator).to(dtype)
        for with_bias in (None, bias):
            exact = F.linear(x.double(), weight.double(), None if with_bias is None else with_bias.double())
            found = packed.linear(x, ready, with_bias)
            assert found.dtype == dtype
            tolerance = 16 * torch.finfo(dtype).eps
            torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance * shape[1] ** 0.5)


def test_a_dtype_without_the_layout_keeps_plain_weights() -> None:
    weight = torch.randn(8, 4, dtype=torch.float64)
    assert not packed.packing_works(torch.float64)
    assert packed.pack(weight) is weight
    x = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(packed.linear(x, weight, None), F.linear(x, weight))


@pytest.mark.parametrize("tied", [True, False])
def test_a_loaded_model_still_names_the_values_of_its_weights(tmp_path: Path, tied: bool) -> None:
    """Plain in the invariant mode, packed in the other; a tied head is packed while the embedding is read by row."""
    write_tiny_llama(tmp_path, tied=tied, attention_bias=True)
    plain, fast = (load(tmp_path, numerics=mode, operators="torch").module for mode in ("invariant", "default"))
    for (name, values), (same_name, same_values) in zip(plain.named_parts(), fast.named_parts(), strict=True):
        assert name == same_name
        assert torch.equal(values, same_values), name
    assert isinstance(plain, Llama)
    assert isinstance(fast, Llama)
    assert not any(weight.is_mkldnn for weight in plain.parameters())
    assert fast.head.is_mkldnn == packed.packing_works(torch.float32)
    assert not fast.embedding.is_mkldnn


@pytest.mark.parametrize("with_bias", [True, False])
def test_products_in_float32_are_those_of_the_packed_weight(with_bias: bool) -> None:
    if not packed.packing_works(torch.bfloat16):
        pytest.skip("this processor has no packed bfloat16")
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(rows, 40, generator=generator).bfloat16() for rows in (24, packed.WIDE_ROWS))
    bias = torch.randn(24, generator=generator).bfloat16() if with_bias else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = packed.linear_in_float32(x, packed.pack(weight), bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize(
    ("vendor", "flags", "slowly"),
    [
        ("GenuineIntel", "avx512f avx512_bf16", True),
        ("GenuineIntel", "avx512f avx512_bf16 amx_bf16", False),
        ("GenuineIntel", "avx512f", False),
        ("AuthenticAMD", "avx512f avx512_bf16", False),
    ],
)
def test_which_processors_multiply_bfloat16_slowly(tmp_path: Path, vendor: str, flags: str, slowly: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu {flags}\n\n")
    assert packed.multiplies_bfloat16_slowly(tmp_path / "cpuinfo") == slowly
    assert not packed.multiplies_bfloat16_slowly(tmp_path / "no such file")
