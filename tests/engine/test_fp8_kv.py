"""A KV cache in 8 bits (e4m3) on the CPU: what is kept, the bitwise mode with it, and whose KV it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.plan_driver import PlanDriver
from engine.attention.base import AttentionBackend, AttentionBatch
from engine.attention.torch_backend import TorchAttention
from engine.attention.torch_invariant import TorchInvariantAttention
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.open_store import namespace_of
from engine.layers.fp8 import FP8, LARGEST
from engine.loader.load import load_model
from engine.protocol import EngineInfo
from engine.runner.build import build_engine
from server.card import card
from tests.support.loading import load
from tests.support.tiny_models import write_tiny_llama

BACKENDS: dict[str, type[AttentionBackend]] = {"torch": TorchAttention, "invariant": TorchInvariantAttention}


def batch_of(tokens: int, block_size: int = 16) -> AttentionBatch:
    """One row whose tokens are all new, in blocks 1, 2, ..."""
    blocks = -(-tokens // block_size)
    positions = torch.arange(tokens)
    return AttentionBatch(
        positions=positions,
        write_index=positions + block_size,
        block_tables=torch.arange(1, blocks + 1, dtype=torch.int32)[None],
        query_starts=torch.tensor([0, tokens], dtype=torch.int32),
        kv_lens=torch.tensor([tokens], dtype=torch.int32),
        host_query_lens=(tokens,),
        host_kv_lens=(tokens,),
        block_size=block_size,
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_attention_reads_what_8_bits_keep(name: str) -> None:
    """The same as a wide cache with keys and values that are numbers of the format."""
    torch.manual_seed(0)
    query, key, value = torch.randn(40, 4, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    batch, found = batch_of(40), []
    for dtype, kept_key, kept_value in ((FP8, key, value), (torch.float32, key.to(FP8), value.to(FP8))):
        backend = BACKENDS[name]()
        caches = tuple(torch.zeros(4, 2, 16, 16).to(dtype) for _ in range(2))
        backend.write_kv(kept_key.float(), kept_value.float(), *caches, batch)
        found.append(backend.attend(query, *caches, batch, scale=0.25))
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_too_large_becomes_the_largest_number(name: str) -> None:
    caches = tuple(torch.zeros(2, 1, 16, 8).to(FP8) for _ in range(2))
    key = torch.full((1, 1, 8), 1e6)
    BACKENDS[name]().write_kv(key, -key, *caches, batch_of(1))
    assert torch.equal(caches[0][1, 0, 0].float(), torch.full((8,), LARGEST))
    assert torch.equal(caches[1][1, 0, 0].float(), torch.full((8,), -LARGEST))


def build(directory: Path, kv_dtype: str, numerics: str = "default") -> EngineInfo:
    config = EngineConfig(
        model=str(directory),
        device="cpu",
        operators="torch",
        numerics=numerics,  # type: ignore[arg-type]
        kv_dtype=kv_dtype,  # type: ignore[arg-type]
        kv_cache_memory_bytes=1 << 24,
    )
    return build_engine(config, lambda fraction, phase: None)[0]


@pytest.mark.parametrize("numerics", ["default", "invariant"])
def test_it_holds_twice_the_tokens_and_is_anothers(tmp_path: Path, numerics: str) -> None:
    write_tiny_llama(tmp_path)
    wide, small = (build(tmp_path, kv_dtype, numerics) for kv_dtype in ("dtype", "fp8"))
    assert small.kv_capacity_tokens + small.block_size == 2 * (wide.kv_capacity_tokens + wide.block_size)
    assert wide.numerics_fingerprint != small.numerics_fingerprint
    assert namespace_of(wide).kv_dtype == "bfloat16"
    assert namespace_of(small).kv_dtype == "float8_e4m3fn"
    assert namespace_of(wide).digest != namespace_of(small).digest
    assert "float8_e4m3fn" in card(small, "http://localhost")
    assert "float8_e4m3fn" not in card(wide, "http://localhost")


def test_logits_stay_near_those_of_a_wide_cache(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    tokens = list(range(10, 80))
    wide, small = (
        PlanDriver(load(tmp_path, operators="torch", kv_dtype=kv_dtype), num_blocks=8, block_size=16)
        for kv_dtype in ("dtype", "fp8")
    )
    exact, found = (driver.all_logits(tokens, 33).double() for driver in (wide, small))
    error = float((found - exact).norm() / exact.norm())
    assert 0 < error < 0.1


@pytest.mark.parametrize("other", [{"operators": "cpp"}, {"weights": "int8"}])
def test_what_cannot_read_it_is_refused(tmp_path: Path, other: dict[str, str]) -> None:
    write_tiny_llama(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", kv_dtype="fp8", **other)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_dtype 'fp8' cannot go with"):
        load_model(config, lambda fraction, phase: None)
