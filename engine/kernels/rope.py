"""What happens to a fused qkv projection before attention, in one pass: q/k norm, rotation, and the KV write.

Queries change in place, keys and values go to the cache (attention reads them there alone, so the projection keeps its
old ones). Everything is float32 inside and rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.chain import chained, wait

_HEAD_TILE = 8


@triton.jit
def _rotate_and_write_kernel(
    qkv,
    positions,
    cos_table,
    sin_table,
    q_weight,
    k_weight,
    eps,
    k_cache,
    v_cache,
    write_index,
    stride_qkv,
    stride_block,
    stride_head,
    stride_token,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    CHAINED: tl.constexpr = False,
):
    """Grid (tokens, tiles of heads): a tile may hold heads of q, k and v. Pairs of a head are (i, i + HALF)."""
    wait(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE))[:, None]
    lane = tl.arange(0, HALF_PAD)[None, :]
    mask = (head < HEADS + 2 * KV_HEADS) & (lane < HALF)
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS
    first_at = qkv + token * stride_qkv + head * 2 * HALF + lane
    first = tl.load(first_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(first_at + HALF, mask=mask, other=0.0).to(tl.float32)
    if q_weight is not None:
        scale = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)
        weight_at = tl.where(is_query, q_weight + lane, k_weight + lane)
        weight_mask = mask & ~is_value
        first_weight = tl.load(weight_at, mask=weight_mask, other=1.0).to(tl.float32)
        second_weight = tl.load(weight_at + HALF, mask=weight_mask, other=1.0).to(tl.float32)
        first = tl.where(is_value, first, first * scale[:, None] * first_weight)
        second = tl.where(is_value, second, second * scale[:, None] * second_weight)
    angle = tl.load(positions + token) * (2 * HALF) + HALF + lane
    cos = tl.load(cos_table + angle, mask=lane < HALF, other=0.0)
    sin = tl.load(sin_table + angle, mask=lane < HALF, other=0.0)
    rotated_first = tl.where(is_value, first, first * cos - second * sin).to(qkv.dtype.element_ty)
    rotated_second = tl.where(is_value, second, second * cos + first * sin).to(qkv.dtype.element_ty)
    tl.store(first_at, rotated_first, mask=mask & is_query)
    tl.store(first_at + HALF, rotated_second, mask=mask & is_query)
    slot = tl.load(write_index + token)
    kv_head = (head - HEADS) % KV_HEADS
    slot_offset = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
    kept_at = tl.where(is_value, v_cache + slot_offset, k_cache + slot_offset) + kv_head * stride_head + lane
    # To 8 bits it is rounded a second time, and what is too large becomes the largest number.
    tl.store(kept_at, rotated_first.to(k_cache.dtype.element_ty), mask=mask & ~is_query)
    tl.store(kept_at + HALF, rotated_second.to(k_cache.dtype.element_ty), mask=mask & ~is_query)


def rotate_and_write_kv(
    qkv: Tensor,
    positions: Tensor,
    cos_table: Tensor,
    sin_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    write_index: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Norm (if weights are given) and rotate q and k of qkv [tokens, heads + 2 * kv_heads, head_dim], store k and v at
    slots `write_index`, and return the new q, a view [tokens, heads, head_dim] of qkv.

    The tables are RotaryTables': float32 [positions, head_dim], the sine's first half negated. Caches have qkv's dtype
    and equal strides.
    """
    tokens, total_heads, head_dim = qkv.shape
    kv_heads, block_size = k_cache.shape[1:3]
    heads = total_heads - 2 * kv_heads
    if tokens > 0:
        _rotate_and_write_kernel[(tokens, triton.cdiv(total_heads, _HEAD_TILE))](
            qkv,
            positions,
            cos_table,
            sin_table,
            q_norm,
            k_norm,
            eps,
            k_cache,
            v_cache,
            write_index,
            qkv.stride(0),
            *k_cache.stride()[:3],
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=head_dim // 2,
            HALF_PAD=triton.next_power_of_2(head_dim // 2),
            BLOCK_SIZE=block_size,
            HEAD_TILE=_HEAD_TILE,
            num_warps=2,
            **chained(qkv.device),
        )
    return qkv[:, :heads]
