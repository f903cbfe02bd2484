"""Attention of long prompts on Hopper: two warpgroups compute, a warp brings the KV, and neither waits for the other.

The online softmax and the layout of KV are those of engine/kernels/attention.py, for blocks of 64 tokens or more. What
Triton cannot say is said here in Gluon: while one warpgroup takes exponents, the other one keeps the tensor cores busy,
and the tensor memory accelerator fills the buffers. Gluon is an experimental part of Triton and has no interpreter:
`available` says whether this device and this Triton have it.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TILE = 64
"""Positions of one load; a step takes two."""

ROWS = 64
"""Rows of queries (tokens times the heads of a group) of one warpgroup. A program has two."""

HEAD_DIMS = (64, 128)

_IS_KNOWN_GLUON = triton.__version__.split(".")[:2] == ["3", "6"]
"""Its interface changes from one version to the next."""

_STAGES = 2
_COMPUTE_REGISTERS = 232
_LOAD_REGISTERS = 40


@gluon.jit
def _load_tiles(
    k_desc,
    v_desc,
    table,
    kv_head,
    kv_heads,
    steps,
    last_block,
    k_tiles,
    v_tiles,
    k_full,
    v_full,
    k_free,
    v_free,
    BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    STEP_BYTES: gl.constexpr,
):  # fmt: skip
    """Bring two tiles of keys and two of values for each step, as soon as both warpgroups are done with the buffers."""
    TILE: gl.constexpr = k_desc.block_type.shape[0]
    for step in range(steps):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        first = 2 * step * TILE
        second = first + TILE
        first_row = (gl.load(table + first // BLOCK_SIZE) * kv_heads + kv_head) * BLOCK_SIZE + first % BLOCK_SIZE
        # The second tile may lie behind the end: any block will do, nothing of it is seen.
        second_block = gl.load(table + gl.minimum(second // BLOCK_SIZE, last_block))
        second_row = (second_block * kv_heads + kv_head) * BLOCK_SIZE + second % BLOCK_SIZE
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), STEP_BYTES)
        tma.async_copy_global_to_shared(k_desc, [first_row, 0], k_full.index(stage), k_tiles.index(2 * stage))
        tma.async_copy_global_to_shared(k_desc, [second_row, 0], k_full.index(stage), k_tiles.index(2 * stage + 1))
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), STEP_BYTES)
        tma.async_copy_global_to_shared(v_desc, [first_row, 0], v_full.index(stage), v_tiles.index(2 * stage))
        tma.async_copy_global_to_shared(v_desc, [second_row, 0], v_full.index(stage), v_tiles.index(2 * stage + 1))


@gluon.jit
def _zero_rows(tile, begin, first, ROWS: gl.constexpr):
    """Zero the rows of `tile` from `begin` on, among the ROWS rows from `first` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    part = tile.slice(first, ROWS, 0)
    values = part.load(layout)
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    part.store(gl.where((row < begin)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _attend(
    out,
    query,
    k_tiles,
    v_tiles,
    k_full,
    v_full,
    k_free,
    v_free,
    both,
    number,
    query_begin,
    tile_token,
    tile_len,
    first_position,
    kv_len,
    kv_head,
    kv_heads,
    stride_query,
    scale_log2e,
    steps,
    full_steps,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TILE: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup's rows, from queries to stored output. Steps before `full_steps` need no mask."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    io_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    packed = number * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, io_layout))
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, io_layout))
    token = query_begin.to(gl.int64) + tile_token + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    mask = (packed < tile_len * GROUP)[:, None]
    queries = gl.load(query + (token * stride_query + head * HEAD_DIM)[:, None] + dim[None, :], mask=mask, other=0.0)
    queries = gl.convert_layout(queries, gl.DotOperandLayout(0, scores_layout, 2))
    position = first_position + (number * ROWS + gl.arange(0, ROWS, rows_layout)) // GROUP

    row_max = gl.full([ROWS], float("-inf"), gl.float32, rows_layout)
    row_sum = gl.full([ROWS], 0.0, gl.float32, rows_layout)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, out_layout)
    zeros = gl.zeros([ROWS, TILE], gl.float32, scores_layout)
    for step in range(steps):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        first = warpgroup_mma(queries, k_tiles.index(2 * stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        second = warpgroup_mma(
            queries, k_tiles.index(2 * stage + 1).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        first, second = warpgroup_mma_wait(0, [first, second])
        gl.thread_barrier()  # every warp has read the keys before one thread says so
        mbarrier.arrive(k_free.index(stage), count=1)
        if step >= full_steps:
            at = 2 * step * TILE + gl.arange(0, TILE, gl.SliceLayout(0, scores_layout))
            first = gl.where(at[None, :] <= position[:, None], first, float("-inf"))
            second = gl.where((at + TILE)[None, :] <= position[:, None], second, float("-inf"))
        # Every row sees position 0, so the maximum is finite from the first step on.
        new_max = gl.maximum(row_max, gl.max(gl.maximum(first, second), 1) * scale_log2e)
        shift = -new_max.expand_dims(1).broadcast_to([ROWS, TILE])
        first = gl.exp2(gl.fma(first, zeros + scale_log2e, shift))
        second = gl.exp2(gl.fma(second, zeros + scale_log2e, shift))
        decay = gl.exp2(row_max - new_max)
        row_sum = row_sum * decay + gl.sum(first + second, 1)
        row_max = new_max
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, out_layout))[:, None]
        first = gl.convert_layout(first.to(queries.dtype), weights_layout)
        second = gl.convert_layout(second.to(queries.dtype), weights_layout)
        mbarrier.wait(v_full.index(stage), phase)
        if 2 * (step + 1) * TILE > kv_len:
            # Slots past the end may hold anything, NaN too: a weight of zero would not silence them.
            end = kv_len - 2 * step * TILE
            _zero_rows(v_tiles.index(2 * stage), end, number * (TILE // 2), TILE // 2)
            _zero_rows(v_tiles.index(2 * stage + 1), end - TILE, number * (TILE // 2), TILE // 2)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(both, count=1)
            mbarrier.wait(both, 0)
        acc = warpgroup_mma(first, v_tiles.index(2 * stage), acc, is_async=True)
        acc = warpgroup_mma(second, v_tiles.index(2 * stage + 1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        gl.thread_barrier()
        mbarrier.arrive(v_free.index(stage), count=1)

    acc = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, out_layout))[:, None]
    offsets = ((token * kv_heads * GROUP + head) * HEAD_DIM)[:, None] + dim[None, :]
    gl.store(out + offsets, gl.convert_layout(acc.to(queries.dtype), io_layout), mask=mask)


@gluon.jit
def _row_of_tile(query_starts, tile, num_rows, TILE_TOKENS: gl.constexpr):
    """Return the row that owns `tile` when row i's tiles begin at query_starts[i] // TILE_TOKENS + i."""
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(query_starts + middle) // TILE_TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@gluon.jit
def _barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=COUNT)
    return barriers


@gluon.jit(do_not_specialize=["num_rows", "stride_table"])
def _prefill_kernel(
    out,
    query,
    k_desc,
    v_desc,
    block_tables,
    query_starts,
    kv_lens,
    scale_log2e,
    stride_query,
    stride_table,
    num_rows,
    kv_heads,
    SHORT_TOKENS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    """Grid (tokens // (2 * ROWS // GROUP) + rows, kv_heads), an upper bound as in the Triton kernel."""
    TILE: gl.constexpr = k_desc.block_type.shape[0]
    TILE_TOKENS: gl.constexpr = 2 * ROWS // GROUP
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    kv_head = gl.program_id(1)
    row = _row_of_tile(query_starts, tile, num_rows, TILE_TOKENS)
    query_begin = gl.load(query_starts + row)
    query_len = gl.load(query_starts + row + 1) - query_begin
    tile_token = (tile - query_begin // TILE_TOKENS - row) * TILE_TOKENS
    if (query_len > SHORT_TOKENS) & (tile_token < query_len):
        kv_len = gl.load(kv_lens + row)
        first_position = kv_len - query_len + tile_token
        tile_len = gl.minimum(query_len - tile_token, TILE_TOKENS)
        steps = gl.cdiv(first_position + tile_len, 2 * TILE)
        full_steps = (first_position + 1) // (2 * TILE)
        last_block = gl.cdiv(kv_len, BLOCK_SIZE) - 1
        table = block_tables + row * stride_table
        k_tiles = gl.allocate_shared_memory(k_desc.dtype, [2 * STAGES, TILE, HEAD_DIM], k_desc.layout)
        v_tiles = gl.allocate_shared_memory(k_desc.dtype, [2 * STAGES, TILE, HEAD_DIM], k_desc.layout)
        k_full = _barriers(STAGES, 1)
        v_full = _barriers(STAGES, 1)
        k_free = _barriers(STAGES, 2)
        v_free = _barriers(STAGES, 2)
        both = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(both, count=2)
        STEP_BYTES: gl.constexpr = 2 * TILE * HEAD_DIM * k_desc.dtype.primitive_bitwidth // 8
        gl.warp_specialize(
            [
                (
                    _attend,
                    (
                        out, query, k_tiles, v_tiles, k_full, v_full, k_free, v_free, both, 0, query_begin, tile_token,
                        tile_len, first_position, kv_len, kv_head, kv_heads, stride_query, scale_log2e, steps,
                        full_steps, GROUP, HEAD_DIM, TILE, ROWS, STAGES,
                    ),
                ),
                (
                    _attend,
                    (
                        out, query, k_tiles, v_tiles, k_full, v_full, k_free, v_free, both, 1, query_begin, tile_token,
                        tile_len, first_position, kv_len, kv_head, kv_heads, stride_query, scale_log2e, steps,
                        full_steps, GROUP, HEAD_DIM, TILE, ROWS, STAGES,
                    ),
                ),
                (
                    _load_tiles,
                    (
                        k_desc, v_desc, table, kv_head, kv_heads, steps, last_block, k_tiles, v_tiles, k_full, v_full,
                        k_free, v_free, BLOCK_SIZE, STAGES, STEP_BYTES,
                    ),
                ),
            ],
            [4, 1],
            [COMPUTE_REGISTERS, LOAD_REGISTERS],
        )  # fmt: skip


def available(query: Tensor, k_cache: Tensor, block_size: int) -> bool:
    """Return whether the kernel is for this device and these shapes: [tokens, heads, head_dim] and the cache's."""
    return (
        _IS_KNOWN_GLUON
        and query.device.type == "cuda"
        and torch.cuda.get_device_capability(query.device)[0] == 9
        and query.dtype in (torch.bfloat16, torch.float16)
        and k_cache.dtype == query.dtype
        and query.shape[2] in HEAD_DIMS
        and query.shape[1] // k_cache.shape[1] <= ROWS
        and block_size % TILE == 0
        and k_cache.is_contiguous()
    )


def prefill_attention(
    out: Tensor,
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    *,
    scale_log2e: float,
    short_tokens: int,
) -> None:
    """Attention of rows with more than `short_tokens` query tokens; arguments as of the Triton kernel's launch.

    Rows see every position before them: there is no window.
    """
    tokens, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = k_cache.shape
    group, num_rows = heads // kv_heads, block_tables.shape[0]
    layout = gl.NVMMASharedLayout(128, 8 * query.element_size(), 2)
    keys, values = (
        TensorDescriptor.from_tensor(cache.view(-1, head_dim), [TILE, head_dim], layout) for cache in (k_cache, v_cache)
    )
    _prefill_kernel[(tokens // (2 * ROWS // group) + num_rows, kv_heads)](
        out,
        query,
        keys,
        values,
        block_tables,
        query_starts,
        kv_lens,
        scale_log2e,
        query.stride(0),
        block_tables.stride(0),
        num_rows,
        kv_heads,
        SHORT_TOKENS=short_tokens,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        ROWS=ROWS,
        STAGES=_STAGES,
        COMPUTE_REGISTERS=_COMPUTE_REGISTERS,
        LOAD_REGISTERS=_LOAD_REGISTERS,
        num_warps=4,
    )
