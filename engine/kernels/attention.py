"""Paged attention in Triton: one kernel for short queries (decode, split over the KV), one for long ones (prefill).

Both fold the query heads of one KV head into the rows of a tile, walk the KV in tiles at absolute multiples of KV_TILE
and keep an online softmax in base 2. Where splits are used their borders are absolute multiples of SPLIT_TOKENS, so a
token's result is a function of its own prefix: with FOLD_SPLITS and equal ROWS and num_warps both kernels do the same
operations in the same order, and fused multiply-adds are spelled out where a compiler could choose.

Knows nothing of backends and batches: engine/attention/triton_backend.py plans the launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.chain import wait


@triton.jit
def _kv_tile_offsets(table, start, kv_len, stride_block, stride_token, BLOCK_SIZE: tl.constexpr, KV_TILE: tl.constexpr):
    """Return the int64 element offsets of positions [start, start + KV_TILE) in the cache of one head."""
    if BLOCK_SIZE % KV_TILE == 0:
        block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        token = start % BLOCK_SIZE + tl.arange(0, KV_TILE)
        offsets = block * stride_block + token * stride_token
    else:
        position = start + tl.arange(0, KV_TILE)
        block = tl.load(table + position // BLOCK_SIZE, mask=position < kv_len, other=0).to(tl.int64)
        offsets = block * stride_block + (position % BLOCK_SIZE) * stride_token
    return offsets


@triton.jit
def _attend_tiles(
    row_max,
    row_sum,
    acc,
    query,
    query_position,
    k_cache,
    v_cache,
    table,
    tile_begin,
    tile_end,
    kv_len,
    scale_log2e,
    stride_block,
    stride_token,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the KV tiles from tile_begin (a multiple of KV_TILE) up to tile_end to an online softmax.

    Without MASKED every position of every tile must be visible to every row. A tile that a row sees nothing of leaves
    its state bitwise as it was.
    """
    dim = tl.arange(0, HEAD_PAD)
    dim_mask = dim < HEAD_DIM
    for start in tl.range(tile_begin, tile_end, KV_TILE):
        offsets = _kv_tile_offsets(table, start, kv_len, stride_block, stride_token, BLOCK_SIZE, KV_TILE)
        position = start + tl.arange(0, KV_TILE)
        if MASKED:
            # Slots past the end may hold anything, NaN too: a weight of zero would not silence them.
            load_mask = (position < kv_len)[:, None] & dim_mask[None, :]
            keys = tl.load(k_cache + offsets[:, None] + dim[None, :], mask=load_mask, other=0.0)
            values = tl.load(v_cache + offsets[:, None] + dim[None, :], mask=load_mask, other=0.0)
        elif HEAD_DIM != HEAD_PAD:
            keys = tl.load(k_cache + offsets[:, None] + dim[None, :], mask=dim_mask[None, :], other=0.0)
            values = tl.load(v_cache + offsets[:, None] + dim[None, :], mask=dim_mask[None, :], other=0.0)
        else:
            keys = tl.load(k_cache + offsets[:, None] + dim[None, :])
            values = tl.load(v_cache + offsets[:, None] + dim[None, :])
        # A cache of 8 bits is widened here; one of the queries' type is left as it is.
        keys, values = keys.to(query.dtype), values.to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if MASKED:
            visible = position[None, :] <= query_position[:, None]
            if WINDOW > 0:
                visible = visible & (position[None, :] > query_position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2e)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(tl.fma(scores, scale_log2e, -shift[:, None]))
        decay = tl.exp2(row_max - shift)
        row_sum = tl.fma(row_sum, decay, tl.sum(weights, 1))
        acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit
def _attend_span(
    query,
    query_position,
    k_cache,
    v_cache,
    table,
    begin,
    end,
    full_begin,
    full_end,
    kv_len,
    scale_log2e,
    stride_block,
    stride_token,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return (max, sum, unnormalised output) over [begin, end); tiles within [full_begin, full_end) need no mask."""
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, HEAD_PAD), tl.float32)
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    if WINDOW > 0:
        row_max, row_sum, acc = _attend_tiles(
            row_max, row_sum, acc, query, query_position, k_cache, v_cache, table, begin, full_begin, kv_len,
            scale_log2e, stride_block, stride_token, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, KV_TILE, WINDOW, True,
        )  # fmt: skip
    row_max, row_sum, acc = _attend_tiles(
        row_max, row_sum, acc, query, query_position, k_cache, v_cache, table, full_begin, full_end, kv_len,
        scale_log2e, stride_block, stride_token, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, KV_TILE, WINDOW, False,
    )  # fmt: skip
    return _attend_tiles(
        row_max, row_sum, acc, query, query_position, k_cache, v_cache, table, full_end, end, kv_len,
        scale_log2e, stride_block, stride_token, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, KV_TILE, WINDOW, True,
    )  # fmt: skip


@triton.jit
def _merge(max_a, sum_a, acc_a, max_b, sum_b, acc_b):
    """Append split b to the folded splits a. Merging a split that a row sees nothing of changes nothing."""
    new_max = tl.maximum(max_a, max_b)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay_a = tl.exp2(max_a - shift)
    decay_b = tl.exp2(max_b - shift)
    new_sum = tl.fma(sum_a, decay_a, sum_b * decay_b)
    new_acc = tl.fma(acc_a, decay_a[:, None], acc_b * decay_b[:, None])
    return new_max, new_sum, new_acc


@triton.jit
def _store_output(out, acc, row_sum, offsets, mask):
    # A padded row sees nothing: it gets zeros, not NaN.
    normalised = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    tl.store(out + offsets, normalised.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits", "packed_rows", "stride_table"])
def split_attention_kernel(
    out,
    query,
    k_cache,
    v_cache,
    partial_acc,
    partial_max,
    partial_sum,
    arrivals,
    block_tables,
    query_starts,
    kv_lens,
    scale_log2e,
    stride_query,
    stride_block,
    stride_head,
    stride_token,
    stride_table,
    num_splits,
    packed_rows,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KV_TILE: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHAINED: tl.constexpr = False,
):
    """Attention of rows with at most ROWS // GROUP query tokens. Grid (num_splits, kv_heads, rows).

    Each program attends over one split and leaves its partial result; the one that arrives last folds them in the order
    of the splits, so the result does not depend on who that is, and resets the row's counter for the next launch.
    partial_* are [rows, kv_heads, num_splits, packed_rows (, HEAD_DIM)]; arrivals is int32 [rows, kv_heads], all zero.
    """
    wait(CHAINED)
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    kv_heads = tl.num_programs(1)
    query_begin = tl.load(query_starts + row)
    query_len = tl.load(query_starts + row + 1) - query_begin
    kv_len = tl.load(kv_lens + row)
    first_position = kv_len - query_len
    first_split = 0
    if WINDOW > 0:
        first_split = tl.maximum(first_position - WINDOW + 1, 0) // SPLIT_TOKENS
    last_split = tl.maximum(tl.cdiv(kv_len, SPLIT_TOKENS), 1) - 1
    unused = (query_len == 0) | (query_len > ROWS // GROUP) | (split < first_split) | (split > last_split)
    if unused:
        return

    packed = tl.arange(0, ROWS)
    packed_mask = packed < query_len * GROUP
    query_position = first_position + packed // GROUP
    dim = tl.arange(0, HEAD_PAD)
    mask = packed_mask[:, None] & (dim < HEAD_DIM)[None, :]
    token = query_begin.to(tl.int64) + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    queries = tl.load(query + (token * stride_query + head * HEAD_DIM)[:, None] + dim[None, :], mask=mask, other=0.0)
    out_offsets = ((token * kv_heads * GROUP + head) * HEAD_DIM)[:, None] + dim[None, :]

    begin = split * SPLIT_TOKENS
    full_begin = begin
    if WINDOW > 0:
        begin = tl.maximum(begin, tl.maximum(first_position - WINDOW + 1, 0) // KV_TILE * KV_TILE)
        full_begin = tl.cdiv(tl.maximum(kv_len - WINDOW, 0), KV_TILE) * KV_TILE
    end = tl.minimum((split + 1) * SPLIT_TOKENS, kv_len)
    row_max, row_sum, acc = _attend_span(
        queries, query_position, k_cache + kv_head * stride_head, v_cache + kv_head * stride_head,
        block_tables + row * stride_table, begin, end, full_begin, (first_position + 1) // KV_TILE * KV_TILE, kv_len,
        scale_log2e, stride_block, stride_token, ROWS, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, KV_TILE, WINDOW,
    )  # fmt: skip
    if first_split == last_split:
        _store_output(out, acc, row_sum, out_offsets, mask)
        return

    head_slot = row * kv_heads + kv_head
    state = (head_slot.to(tl.int64) * num_splits + split) * packed_rows + packed
    tl.store(partial_max + state, row_max, mask=packed_mask)
    tl.store(partial_sum + state, row_sum, mask=packed_mask)
    tl.store(partial_acc + state[:, None] * HEAD_DIM + dim[None, :], acc, mask=mask)
    tl.debug_barrier()  # every thread's partials are stored before one thread announces them
    arrived = tl.atomic_add(arrivals + head_slot, 1, sem="acq_rel")
    if arrived == last_split - first_split:
        tl.debug_barrier()
        row_max = tl.full((ROWS,), float("-inf"), tl.float32)
        row_sum = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, HEAD_PAD), tl.float32)
        for other in range(first_split, last_split + 1):
            state = (head_slot.to(tl.int64) * num_splits + other) * packed_rows + packed
            # .cg: partials of other multiprocessors must come from L2.
            other_max = tl.load(partial_max + state, mask=packed_mask, other=0.0, cache_modifier=".cg")
            other_sum = tl.load(partial_sum + state, mask=packed_mask, other=0.0, cache_modifier=".cg")
            other_acc = tl.load(
                partial_acc + state[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0, cache_modifier=".cg"
            )
            row_max, row_sum, acc = _merge(row_max, row_sum, acc, other_max, other_sum, other_acc)
        _store_output(out, acc, row_sum, out_offsets, mask)
        tl.store(arrivals + head_slot, 0)


@triton.jit
def _row_of_tile(query_starts, tile, num_rows, TILE_TOKENS: tl.constexpr):
    """Return the row that owns `tile` when row i's tiles begin at query_starts[i] // TILE_TOKENS + i."""
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // TILE_TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["num_rows", "stride_table"])
def prefill_attention_kernel(
    out,
    query,
    k_cache,
    v_cache,
    block_tables,
    query_starts,
    kv_lens,
    scale_log2e,
    stride_query,
    stride_block,
    stride_head,
    stride_token,
    stride_table,
    num_rows,
    SHORT_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KV_TILE: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    FOLD_SPLITS: tl.constexpr,
):
    """Attention of rows with more than SHORT_TOKENS query tokens. Grid (tokens // (ROWS // GROUP) + rows, kv_heads).

    The grid is an upper bound: each program finds its row by bisection, and those beyond a row's tokens return.
    """
    TILE_TOKENS: tl.constexpr = ROWS // GROUP
    # The last tiles of a prompt see the most KV: start them first, so that the grid does not end on them.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    row = _row_of_tile(query_starts, tile, num_rows, TILE_TOKENS)
    query_begin = tl.load(query_starts + row)
    query_len = tl.load(query_starts + row + 1) - query_begin
    tile_token = (tile - query_begin // TILE_TOKENS - row) * TILE_TOKENS
    if (query_len <= SHORT_TOKENS) | (tile_token >= query_len):
        return
    kv_len = tl.load(kv_lens + row)
    first_position = kv_len - query_len + tile_token
    tile_len = tl.minimum(query_len - tile_token, TILE_TOKENS)

    packed = tl.arange(0, ROWS)
    query_position = first_position + packed // GROUP
    dim = tl.arange(0, HEAD_PAD)
    mask = (packed < tile_len * GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    token = query_begin.to(tl.int64) + tile_token + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    queries = tl.load(query + (token * stride_query + head * HEAD_DIM)[:, None] + dim[None, :], mask=mask, other=0.0)

    begin = 0
    full_begin = 0
    end = first_position + tile_len
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // KV_TILE * KV_TILE
        full_begin = tl.cdiv(tl.maximum(end - WINDOW, 0), KV_TILE) * KV_TILE
    full_end = (first_position + 1) // KV_TILE * KV_TILE
    k_cache += kv_head * stride_head
    v_cache += kv_head * stride_head
    table = block_tables + row * stride_table
    if FOLD_SPLITS:
        row_max = tl.full((ROWS,), float("-inf"), tl.float32)
        row_sum = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, HEAD_PAD), tl.float32)
        for split in range(begin // SPLIT_TOKENS, tl.cdiv(end, SPLIT_TOKENS)):
            split_max, split_sum, split_acc = _attend_span(
                queries, query_position, k_cache, v_cache, table, tl.maximum(begin, split * SPLIT_TOKENS),
                tl.minimum(end, (split + 1) * SPLIT_TOKENS), full_begin, full_end, kv_len, scale_log2e, stride_block,
                stride_token, ROWS, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, KV_TILE, WINDOW,
            )  # fmt: skip
            row_max, row_sum, acc = _merge(row_max, row_sum, acc, split_max, split_sum, split_acc)
    else:
        row_max, row_sum, acc = _attend_span(
            queries, query_position, k_cache, v_cache, table, begin, end, full_begin, full_end, kv_len, scale_log2e,
            stride_block, stride_token, ROWS, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, KV_TILE, WINDOW,
        )  # fmt: skip
    out_offsets = ((token * kv_heads * GROUP + head) * HEAD_DIM)[:, None] + dim[None, :]
    _store_output(out, acc, row_sum, out_offsets, mask)
