from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.kernels.activation import silu_and_mul
from engine.kernels.kv import write_kv
from engine.kernels.norm import add_rms_norm, rms_norm
from engine.kernels.rope import rotate_and_write_kv
from engine.layers.rope_settings import RopeSettings
from engine.layers.rotary import RotaryTables
from tests.support.paged import paged_batch


@pytest.mark.parametrize("size", [64, 100, 576])
def test_rms_norm_is_torchs(device: torch.device, size: int) -> None:
    x, weight = torch.randn(5, size, device=device), torch.randn(size, device=device)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (size,), weight, 1e-5), rtol=1e-5, atol=1e-5)


def test_rms_norm_of_strided_rows(device: torch.device) -> None:
    wide, weight = torch.randn(4, 100, device=device), torch.randn(64, device=device)
    x = wide[:, 20:84]
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (64,), weight, 1e-5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_add_rms_norm_norms_what_it_leaves_in_the_residual(device: torch.device, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 5, 96, device=device).to(dtype).unbind()
    weight = torch.randn(96, device=device).to(dtype)
    residual = residual.contiguous()
    expected_sum = x + residual
    out = add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(residual, expected_sum, rtol=0, atol=0)
    torch.testing.assert_close(out, F.rms_norm(expected_sum.float(), (96,), weight.float(), 1e-6).to(dtype))


@pytest.mark.parametrize("size", [48, 1500])
def test_silu_and_mul(device: torch.device, size: int) -> None:
    gate_up = torch.randn(3, 2 * size, device=device)
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(silu_and_mul(gate_up), F.silu(gate) * up, rtol=1e-5, atol=1e-5)


def test_write_kv_fills_the_slots_and_nothing_else(device: torch.device) -> None:
    batch = paged_batch((3, 17, 1), (3, 20, 33), 16, device)
    key, value = torch.randn(21, 6, 24, device=device).split(3, 1)
    caches = torch.full((2, 7, 3, 16, 24), 7.0, device=device)
    write_kv(key, value, caches[0], caches[1], batch.write_index, 16)
    block, offset = batch.write_index // 16, batch.write_index % 16
    expected = torch.full_like(caches, 7.0)
    expected[0, block, :, offset] = key
    expected[1, block, :, offset] = value
    assert torch.equal(caches, expected)


@pytest.mark.parametrize("head_dim", [32, 48])
@pytest.mark.parametrize("norm", [False, True])
def test_rotate_and_write_kv_is_norm_then_rotation_then_write(device: torch.device, head_dim: int, norm: bool) -> None:
    heads, kv_heads = 9, 3
    batch = paged_batch((3, 17, 1), (3, 20, 33), 16, device)
    qkv = torch.randn(21, heads + 2 * kv_heads, head_dim, device=device)
    q, k, v = qkv.clone().split((heads, kv_heads, kv_heads), 1)
    weights = torch.randn(2, head_dim, device=device)
    if norm:
        q = F.rms_norm(q, (head_dim,), weights[0], 1e-6)
        k = F.rms_norm(k, (head_dim,), weights[1], 1e-6)
    tables = RotaryTables(head_dim, 64, RopeSettings(theta=10000.0), device)
    cos, sin = tables.at(batch.positions)
    caches = torch.full((2, 7, kv_heads, 16, head_dim), 7.0, device=device)
    expected = caches.clone()
    block, offset = batch.write_index // 16, batch.write_index % 16
    expected[0, block, :, offset] = tables.rotate(k, cos, sin)
    expected[1, block, :, offset] = v

    rotated = rotate_and_write_kv(
        qkv,
        batch.positions,
        tables.cos,
        tables.sin,
        caches[0],
        caches[1],
        batch.write_index,
        q_norm=weights[0] if norm else None,
        k_norm=weights[1] if norm else None,
        eps=1e-6,
    )
    torch.testing.assert_close(rotated, tables.rotate(q, cos, sin), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(caches, expected, rtol=1e-5, atol=1e-5)
