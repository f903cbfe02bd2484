"""Attention from torch operators against a float64 softmax of one row at a time."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.attention.base import AttentionBackend
from engine.attention.torch_backend import TorchAttention
from engine.attention.torch_invariant import TorchInvariantAttention
from tests.support.paged import PagedCase, attend_in_float64, paged_case

BACKENDS: list[type[AttentionBackend]] = [TorchAttention, TorchInvariantAttention]
BATCHES = {
    "decode": ((1, 1, 1, 1, 1), (1, 16, 17, 90, 33)),
    "prefill": ((5, 40, 16), (5, 40, 16)),
    "chunks behind a prefix": ((3, 20, 32), (30, 52, 64)),
    "mixed": ((1, 17, 1, 2), (70, 17, 5, 100)),
}


def finite_case(batch: str, heads: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> PagedCase:
    """The case's unused slots are NaN; a runner's are finite, and so large here that reading one would show."""
    query_lens, kv_lens = BATCHES[batch]
    torch.manual_seed(1)
    case = paged_case(
        query_lens,
        kv_lens,
        block_size=16,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=32,
        device=torch.device("cpu"),
        dtype=dtype,
    )
    k_cache, v_cache = (cache.nan_to_num(1e4) for cache in (case.k_cache, case.v_cache))
    return dataclasses.replace(case, k_cache=k_cache, v_cache=v_cache)


@pytest.mark.parametrize("window_tokens", [None, 1, 7, 40])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_equals_one_softmax_per_row(
    batch: str, backend: type[AttentionBackend], window_tokens: int | None
) -> None:
    for heads, kv_heads in ((6, 2), (4, 4), (5, 1)):
        case = finite_case(batch, heads, kv_heads)
        output = backend().attend(
            case.query, case.k_cache, case.v_cache, case.batch, scale=0.2, window_tokens=window_tokens
        )
        expected = attend_in_float64(case, scale=0.2, window_tokens=window_tokens)
        torch.testing.assert_close(output.double(), expected.double(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_attention_stays_near(backend: type[AttentionBackend], dtype: torch.dtype) -> None:
    case = finite_case("mixed", 6, 2, dtype)
    output = backend().attend(case.query, case.k_cache, case.v_cache, case.batch, scale=0.2)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), attend_in_float64(case, scale=0.2).double(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kv_is_written_where_the_batch_says_and_nowhere_else(backend: type[AttentionBackend]) -> None:
    case = finite_case("mixed", 6, 2)
    key, value = (torch.randn(case.query.shape[0], 2, 32) for _ in range(2))
    k_cache, v_cache = torch.zeros_like(case.k_cache), torch.zeros_like(case.v_cache)
    backend().write_kv(key, value, k_cache, v_cache, case.batch)
    for cache, written in ((k_cache, key), (v_cache, value)):
        for token, index in enumerate(case.batch.write_index.tolist()):
            assert torch.equal(cache[index // 16, :, index % 16], written[token])
        assert int((cache != 0).any(dim=-1).sum()) == 2 * len(key)


@pytest.mark.parametrize("window_tokens", [1, 7, 18, 40])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", BATCHES)
def test_blocks_behind_a_window_may_be_anybodys(
    batch: str, backend: type[AttentionBackend], window_tokens: int
) -> None:
    """A request whose KV is not finite may have got them since: it must not reach those who left them."""
    case = finite_case(batch, 6, 2)
    expected = attend_in_float64(case, scale=0.2, window_tokens=window_tokens)
    spoilt = len(case.k_cache)
    k_cache, v_cache = (
        torch.cat((cache, torch.full_like(cache[:1], torch.nan))) for cache in (case.k_cache, case.v_cache)
    )
    for row, (queries, end) in enumerate(zip(case.batch.host_query_lens, case.batch.host_kv_lens, strict=True)):
        case.batch.block_tables[row, : max(0, end - queries - window_tokens + 1) // 16] = spoilt
    assert batch == "prefill" or window_tokens > 7 or bool((case.batch.block_tables == spoilt).any())
    output = backend().attend(case.query, k_cache, v_cache, case.batch, scale=0.2, window_tokens=window_tokens)
    torch.testing.assert_close(output.double(), expected.double(), rtol=0, atol=2e-5)
