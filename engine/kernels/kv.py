"""Writing a step's keys and values into the paged cache, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_kv_kernel(
    key,
    value,
    k_cache,
    v_cache,
    write_index,
    stride_key,
    stride_value,
    stride_block,
    stride_head,
    stride_token,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program per token copies all its heads."""
    token = tl.program_id(0)
    slot = tl.load(write_index + token)
    cache_base = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
    lane = tl.arange(0, WIDTH)
    mask = lane < KV_HEADS * HEAD_DIM
    cache_offset = cache_base + lane // HEAD_DIM * stride_head + lane % HEAD_DIM
    row = token.to(tl.int64)
    keys = tl.load(key + row * stride_key + lane, mask=mask)
    values = tl.load(value + row * stride_value + lane, mask=mask)
    tl.store(k_cache + cache_offset, keys.to(k_cache.dtype.element_ty), mask=mask)
    tl.store(v_cache + cache_offset, values.to(v_cache.dtype.element_ty), mask=mask)


def write_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, write_index: Tensor, block_size: int
) -> None:
    """Store key and value [tokens, kv_heads, head_dim] at slots `write_index` (int64); only a token must be dense."""
    tokens, kv_heads, head_dim = key.shape
    if tokens == 0:
        return
    _write_kv_kernel[(tokens,)](
        key,
        value,
        k_cache,
        v_cache,
        write_index,
        key.stride(0),
        value.stride(0),
        *k_cache.stride()[:3],
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WIDTH=triton.next_power_of_2(kv_heads * head_dim),
    )
