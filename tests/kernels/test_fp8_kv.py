"""A KV cache in 8 bits through the kernels. Keys and values are numbers of the format: Triton's interpreter reads it
right, but rounds to it wrongly.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.attention.base import write_kv_by_index
from engine.attention.triton_backend import TritonAttention, TritonTiles
from engine.kernels.kv import write_kv
from engine.kernels.rope import rotate_and_write_kv
from engine.layers.fp8 import FP8
from tests.kernels.test_attention import SMALL_DEFAULT, SMALL_INVARIANT, attend, relative_error
from tests.support.paged import attend_in_float64, paged_batch, paged_case


def numbers(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(FP8).float()


@pytest.mark.parametrize("tiles", [SMALL_DEFAULT, SMALL_INVARIANT], ids=["default", "invariant"])
@pytest.mark.parametrize("window_tokens", [None, 20])
@pytest.mark.parametrize(("head_dim", "dtype"), [(24, torch.float32), (16, torch.float16)])
def test_attention_is_of_what_the_cache_holds(
    device: torch.device, tiles: TritonTiles, window_tokens: int | None, head_dim: int, dtype: torch.dtype
) -> None:
    case = paged_case(
        (1, 20, 3), (40, 20, 41), block_size=16, heads=4, kv_heads=2, head_dim=head_dim, device=device, dtype=dtype
    )
    small = replace(case, k_cache=case.k_cache.to(FP8), v_cache=case.v_cache.to(FP8))
    assert small.k_cache.float().isnan().any(), "unused slots are not numbers"
    wide = replace(case, k_cache=small.k_cache.float(), v_cache=small.v_cache.float())
    expected = attend_in_float64(wide, scale=head_dim**-0.5, window_tokens=window_tokens)
    actual = attend(small, tiles, window_tokens)
    assert actual.dtype == dtype
    assert relative_error(actual, expected) < (1e-5 if dtype == torch.float32 else 2e-3)


def test_hoppers_own_kernel_leaves_8_bits_to_the_other(device: torch.device) -> None:
    hopper = pytest.importorskip("engine.kernels.hopper_attention")
    query, cache = torch.empty(4, 8, 128, device=device).bfloat16(), torch.empty(2, 8, 128, 128, device=device)
    assert not hopper.available(query, cache.to(FP8), 128)


def test_both_writes_keep_the_numbers_and_touch_nothing_else(device: torch.device) -> None:
    heads, kv_heads, head_dim = 4, 3, 24
    batch = paged_batch((3, 17, 1), (3, 20, 33), 16, device)
    qkv = numbers(21, heads + 2 * kv_heads, head_dim, device=device)
    _, key, value = qkv.clone().split((heads, kv_heads, kv_heads), 1)
    block, offset = batch.write_index // 16, batch.write_index % 16
    expected = torch.full((2, 7, kv_heads, 16, head_dim), 7.0, device=device)
    expected[0, block, :, offset], expected[1, block, :, offset] = key, value
    plain, turned = (torch.full_like(expected, 7.0).to(FP8) for _ in range(2))
    write_kv(key, value, plain[0], plain[1], batch.write_index, 16)
    cos = torch.ones(64, head_dim, device=device)  # a rotation by nothing rounds nothing
    rotate_and_write_kv(qkv, batch.positions, cos, torch.zeros_like(cos), turned[0], turned[1], batch.write_index)
    assert torch.equal(plain.float(), expected)
    assert torch.equal(turned.float(), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's interpreter rounds to e4m3 wrongly")
def test_what_is_written_is_rounded_and_held_within_the_range(device: torch.device) -> None:
    batch = paged_batch((3, 17, 1), (3, 20, 33), 16, device)
    key, value = (torch.randn(21, 2, 64, device=device).bfloat16() * 300 for _ in range(2))
    caches = torch.zeros(2, 7, 2, 16, 64, device=device).to(FP8)
    twins = caches.clone()
    TritonAttention().write_kv(key, value, caches[0], caches[1], batch)
    write_kv_by_index(key, value, twins[0], twins[1], batch)
    assert torch.equal(caches.view(torch.uint8), twins.view(torch.uint8))
