"""Weights in 8 bits (e4m3) on the CPU: what they stand for, products with them, and what cannot go with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.open_store import namespace_of
from engine.layers import fp8
from engine.layers.linear import Linear
from engine.layers.row_ops import row_ops
from engine.loader.load import load_model
from engine.models.llama import Llama
from engine.runner.build import build_engine
from tests.support.loading import load
from tests.support.tiny_models import write_tiny_llama

CPU = torch.device("cpu")


def test_a_row_keeps_its_own_range() -> None:
    torch.manual_seed(0)
    exact = torch.randn(5, 300) * torch.logspace(-20, 20, 5)[:, None]
    values, scales = fp8.quantise_rows(exact)
    found = fp8.Fp8Rows(values, scales).to_dense()
    assert values.dtype == fp8.FP8
    assert ((found - exact).abs() <= (exact.abs() / 16).maximum(scales[:, None] * 2**-10)).all()
    assert torch.equal(values.float().abs().amax(dim=1), torch.full((5,), fp8.LARGEST))


@pytest.mark.parametrize("row", [torch.zeros(8), torch.full((8,), 1e-38), torch.full((8,), 3e38)])
def test_rows_at_the_ends_of_the_range_stay_finite(row: torch.Tensor) -> None:
    rows = fp8.Fp8Rows(*fp8.quantise_rows(row[None]))
    assert rows.to_dense().isfinite().all()
    torch.testing.assert_close(rows.to_dense()[0], row, rtol=2**-4, atol=1e-30)


def test_what_is_not_a_number_stays_seen() -> None:
    assert fp8.Fp8Rows(*fp8.quantise_rows(torch.tensor([[1.0, torch.nan]]))).to_dense().isnan().any()


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_tokens_are_rounded_as_well(tokens: int, bias: bool) -> None:
    torch.manual_seed(0)
    product = row_ops("default", CPU, "fp8").fp8_linear
    values, scales = fp8.quantise_rows(torch.randn(40, 96))
    x, b = torch.randn(tokens, 96), torch.randn(40) if bias else None
    seen = fp8.Fp8Rows(*fp8.quantise_rows(x)).to_dense()
    expected = F.linear(seen.double(), fp8.Fp8Rows(values, scales).to_dense().double())
    assert product is not None
    expected = expected if b is None else expected + b.double()
    torch.testing.assert_close(product(x, values, scales, b).double(), expected, rtol=1e-4, atol=1e-4)


def test_rows_of_the_invariant_mode_ignore_their_number() -> None:
    torch.manual_seed(0)
    product = row_ops("invariant", CPU, "fp8").fp8_linear
    assert product is not None
    values, scales = fp8.quantise_rows(torch.randn(40, 100))
    x = torch.randn(50, 100).bfloat16()
    whole = product(x, values, scales, None)
    for count in (1, 3, 16, 17, 33):
        assert torch.equal(product(x[50 - count :].clone(), values, scales, None), whole[50 - count :])


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_holds_8_bits_of_its_layers_and_names_what_they_stand_for(tmp_path: Path, tied: bool) -> None:
    write_tiny_llama(tmp_path, tied=tied, attention_bias=True)
    plain, small = load(tmp_path, operators="torch"), load(tmp_path, weights="fp8")
    assert isinstance(small.module, Llama)
    assert all(part.weight.dtype == fp8.FP8 for part in small.module.modules() if isinstance(part, Linear))
    for (name, exact), (same_name, part) in zip(plain.module.named_parts(), small.module.named_parts(), strict=True):
        assert name == same_name
        rounded = isinstance(part, fp8.Fp8Rows)
        assert rounded == (name.endswith("_proj.weight"))
        wanted = fp8.Fp8Rows(*fp8.quantise_rows(exact)).to_dense() if rounded else exact
        assert torch.equal(part.to_dense(), wanted), name
    assert small.weights_digest == plain.weights_digest


@pytest.mark.parametrize("numerics", ["default", "invariant"])
def test_other_weights_are_another_numerics_and_their_kv_is_anothers(tmp_path: Path, numerics: str) -> None:
    write_tiny_llama(tmp_path)
    infos = [
        build_engine(
            EngineConfig(
                model=str(tmp_path),
                device="cpu",
                operators="torch",
                numerics=numerics,  # type: ignore[arg-type]
                weights=weights,  # type: ignore[arg-type]
                kv_cache_memory_bytes=1 << 24,
            ),
            lambda fraction, phase: None,
        )[0]
        for weights in ("dtype", "fp8")
    ]
    assert infos[1].operators.endswith("_fp8")
    assert infos[0].numerics_fingerprint != infos[1].numerics_fingerprint
    assert namespace_of(infos[0]).digest != namespace_of(infos[1]).digest


def test_operators_that_cannot_read_them_are_refused(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", weights="fp8", operators="cpp")
    with pytest.raises(ConfigError, match="weights 'fp8' cannot go with operators 'cpp'"):
        load_model(config, lambda fraction, phase: None)
