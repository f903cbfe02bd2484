from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.attention import registry
from engine.attention.triton_backend import DEFAULT_TILES, INVARIANT_TILES, TritonAttention, TritonTiles
from engine.errors import ConfigError
from engine.protocol import Numerics
from tests.support.paged import PagedCase, attend_in_float64, paged_case

SMALL_DEFAULT = replace(DEFAULT_TILES, prefill_rows=32, kv_tile=16, split_tokens=32)
SMALL_INVARIANT = replace(INVARIANT_TILES, split_rows=16, prefill_rows=16, kv_tile=16, split_tokens=32)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def attend(case: PagedCase, tiles: TritonTiles, window_tokens: int | None = None) -> Tensor:
    backend = TritonAttention("under test", tiles)
    scale = case.query.shape[2] ** -0.5
    return backend.attend(case.query, case.k_cache, case.v_cache, case.batch, scale=scale, window_tokens=window_tokens)


@pytest.mark.parametrize("tiles", [SMALL_DEFAULT, SMALL_INVARIANT], ids=["default", "invariant"])
@pytest.mark.parametrize("window_tokens", [None, 20])
@pytest.mark.parametrize("block_size", [16, 64])
def test_mixed_batches_match_float64(
    device: torch.device, tiles: TritonTiles, window_tokens: int | None, block_size: int
) -> None:
    case = paged_case(
        (1, 37, 1, 3, 16), (70, 37, 1, 41, 50), block_size=block_size, heads=4, kv_heads=2, head_dim=16, device=device
    )
    actual = attend(case, tiles, window_tokens)
    expected = attend_in_float64(case, scale=0.25, window_tokens=window_tokens)
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (7, 1, 24), (3, 3, 32)])
def test_group_and_head_sizes_need_not_be_powers_of_two(
    device: torch.device, heads: int, kv_heads: int, head_dim: int
) -> None:
    case = paged_case(
        (1, 20), (40, 33), block_size=16, heads=heads, kv_heads=kv_heads, head_dim=head_dim, device=device
    )
    expected = attend_in_float64(case, scale=head_dim**-0.5)
    assert relative_error(attend(case, SMALL_DEFAULT), expected) < 1e-5


def test_half_precision_caches(device: torch.device) -> None:
    case = paged_case(
        (1, 20), (90, 20), block_size=32, heads=4, kv_heads=2, head_dim=32, device=device, dtype=torch.float16
    )
    actual = attend(case, SMALL_DEFAULT)
    assert actual.dtype == torch.float16
    assert relative_error(actual, attend_in_float64(case, scale=32**-0.5)) < 2e-3


def test_packaged_tiles(device: torch.device) -> None:
    case = paged_case((1, 130), (300, 130), block_size=64, heads=2, kv_heads=1, head_dim=64, device=device)
    expected = attend_in_float64(case, scale=0.125)
    for tiles in (DEFAULT_TILES, INVARIANT_TILES):
        assert relative_error(attend(case, tiles), expected) < 1e-5


def test_counters_are_zero_again_after_a_launch(device: torch.device) -> None:
    case = paged_case((1, 1), (100, 40), block_size=16, heads=4, kv_heads=2, head_dim=16, device=device)
    backend = TritonAttention("under test", SMALL_DEFAULT)
    first = backend.attend(case.query, case.k_cache, case.v_cache, case.batch, scale=0.25)
    second = backend.attend(case.query, case.k_cache, case.v_cache, case.batch, scale=0.25)
    assert relative_error(first, attend_in_float64(case, scale=0.25)) < 1e-5
    assert torch.equal(first, second)


def test_unused_table_columns_change_nothing(device: torch.device) -> None:
    case = paged_case((1, 1), (40, 100), block_size=16, heads=4, kv_heads=2, head_dim=16, device=device, spare_blocks=4)
    narrow = replace(case, batch=replace(case.batch, block_tables=case.batch.block_tables[:, :7].contiguous()))
    assert torch.equal(attend(case, SMALL_DEFAULT), attend(narrow, SMALL_DEFAULT))


def test_a_padded_row_gives_zeros(device: torch.device) -> None:
    case = paged_case((1, 1), (40, 1), block_size=16, heads=4, kv_heads=2, head_dim=16, device=device)
    kv_lens = torch.tensor([40, 0], dtype=torch.int32, device=device)
    padded = replace(case, batch=replace(case.batch, kv_lens=kv_lens))
    assert torch.equal(attend(padded, SMALL_DEFAULT)[1], torch.zeros(4, 16, device=device))


def only_last_tokens(case: PagedCase, counts: tuple[int, ...]) -> PagedCase:
    """The same rows with only their last `counts` tokens as queries: the rest comes from the cache."""
    batch = case.batch
    ends = batch.query_starts[1:].tolist()
    keep = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    keep = keep.to(case.query.device)
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(case.query.device)
    shorter = replace(
        batch,
        positions=batch.positions[keep],
        write_index=batch.write_index[keep],
        query_starts=starts,
        host_query_lens=counts,
    )
    return replace(case, batch=shorter, query=case.query[keep])


def only_row(case: PagedCase, row: int) -> PagedCase:
    """One row of a batch, alone."""
    batch = case.batch
    begin, end = batch.query_starts[row : row + 2].tolist()
    alone = replace(
        batch,
        positions=batch.positions[begin:end],
        write_index=batch.write_index[begin:end],
        block_tables=batch.block_tables[row : row + 1],
        query_starts=batch.query_starts[row : row + 2] - begin,
        kv_lens=batch.kv_lens[row : row + 1],
        host_query_lens=batch.host_query_lens[row : row + 1],
        host_kv_lens=batch.host_kv_lens[row : row + 1],
    )
    return replace(case, batch=alone, query=case.query[begin:end])


@pytest.mark.parametrize("window_tokens", [None, 24])
def test_invariant_results_do_not_depend_on_batch_chunk_or_cache(
    device: torch.device, window_tokens: int | None
) -> None:
    lens = (75, 42, 9)
    whole = paged_case(lens, lens, block_size=32, heads=6, kv_heads=2, head_dim=16, device=device)
    result = attend(whole, SMALL_INVARIANT, window_tokens)
    assert relative_error(result, attend_in_float64(whole, scale=0.25, window_tokens=window_tokens)) < 1e-5
    for row, (begin, end) in enumerate([(0, 75), (75, 117), (117, 126)]):
        alone = attend(only_row(whole, row), SMALL_INVARIANT, window_tokens)
        assert torch.equal(alone, result[begin:end])
    for counts in [(1, 1, 1), (30, 1, 5), (7, 40, 2)]:
        tail = attend(only_last_tokens(whole, counts), SMALL_INVARIANT, window_tokens)
        ends = (75, 117, 126)
        same = torch.cat([result[end - count : end] for end, count in zip(ends, counts, strict=True)])
        assert torch.equal(tail, same)


@pytest.mark.parametrize(("numerics", "name"), [("default", "triton"), ("invariant", "triton_invariant")])
def test_the_registry_prefers_triton_on_a_gpu(numerics: Numerics, name: str) -> None:
    assert registry.choose(torch.device("cuda"), numerics).name == name


def test_without_triton_the_registry_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [
        module for module in sys.modules if module.startswith(("engine.kernels.", "engine.attention.triton"))
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError) as caught:
        registry.choose(torch.device("cuda"), "default", "triton")
    assert "pip install" in str(caught.value.hint)
