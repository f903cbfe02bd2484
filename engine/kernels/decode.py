"""The two ends of a decode step on the device, so that the host sends a few numbers per row and no tokens.

What a row of the host's header means is written here once, as HEADER_COLUMNS; engine/runner/decode_graphs.py fills it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.chain import chained, wait
from engine.kernels.sampling import _mix

HEADER_COLUMNS = ("slot", "position", "seed_low", "seed_high", "temperature")
"""int32 each, `temperature` a float32's bits. The position is that of the row's token; -1 makes a padded row, which
attends over nothing and writes to the null block."""

_LANES = 32


@triton.jit
def _decode_inputs_kernel(
    token_ids,
    positions,
    kv_lens,
    write_index,
    slots,
    keys,
    temperatures,
    header,
    table,
    last_tokens,
    rows,
    width,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    CHAINED: tl.constexpr = False,
):
    wait(CHAINED)
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = row < rows
    slot = tl.load(header + row, mask=mask, other=0).to(tl.int64)
    position = tl.load(header + rows + row, mask=mask, other=-1)
    seed_low = tl.load(header + 2 * rows + row, mask=mask, other=0).to(tl.uint32, bitcast=True)
    seed_high = tl.load(header + 3 * rows + row, mask=mask, other=0).to(tl.uint32, bitcast=True)
    temperature = tl.load(header + 4 * rows + row, mask=mask, other=0).to(tl.float32, bitcast=True)
    at = tl.maximum(position, 0)
    block = tl.load(table + row.to(tl.int64) * width + at // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    tl.store(token_ids + row, tl.load(last_tokens + slot, mask=mask, other=0), mask=mask)
    tl.store(positions + row, at.to(tl.int64), mask=mask)
    tl.store(kv_lens + row, position + 1, mask=mask)
    tl.store(write_index + row, block * BLOCK_SIZE + at % BLOCK_SIZE, mask=mask)
    tl.store(slots + row, slot, mask=mask)
    tl.store(temperatures + row, temperature, mask=mask)
    # engine/sampler/noise.py's key of (seed, position of the new token, Purpose.TARGET = 0).
    counter = ((at + 1) * 4).to(tl.uint32, bitcast=True)
    low = _mix(_mix(_mix(seed_low ^ 0x9E3779B9) ^ seed_high) ^ counter)
    high = _mix(_mix(_mix(seed_high ^ 0x85EBCA77) ^ seed_low) ^ counter)
    tl.store(keys + 2 * row, low.to(tl.int32, bitcast=True), mask=mask)
    tl.store(keys + 2 * row + 1, high.to(tl.int32, bitcast=True), mask=mask)


def decode_inputs(
    header: Tensor,
    table: Tensor,
    last_tokens: Tensor,
    block_size: int,
    *,
    token_ids: Tensor,
    positions: Tensor,
    kv_lens: Tensor,
    write_index: Tensor,
    slots: Tensor,
    keys: Tensor,
    temperatures: Tensor,
) -> None:
    """Fill the named tensors of a decode step, one entry per row (keys: two).

    header is int32 [at least len(HEADER_COLUMNS), rows], contiguous; table int32 [rows, width]; last_tokens int64 by
    slot. token_ids, positions, write_index and slots are int64, kv_lens and keys int32, temperatures float32.
    """
    rows, width = table.shape
    _decode_inputs_kernel[(triton.cdiv(rows, _LANES),)](
        token_ids,
        positions,
        kv_lens,
        write_index,
        slots,
        keys,
        temperatures,
        header,
        table,
        last_tokens,
        rows,
        width,
        BLOCK_SIZE=block_size,
        LANES=_LANES,
        num_warps=1,
        **chained(header.device),
    )


@triton.jit
def _keep_tokens_kernel(
    kept, last_tokens, token_ids, largest, slots, rows, LANES: tl.constexpr, CHAINED: tl.constexpr = False
):
    wait(CHAINED)
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = row < rows
    token = tl.load(token_ids + row, mask=mask, other=0)
    finite = tl.abs(tl.load(largest + row, mask=mask, other=0.0)) < float("inf")
    slot = tl.load(slots + row, mask=mask, other=0)
    tl.store(last_tokens + slot, tl.where(finite, token, 0), mask=mask)
    tl.store(kept + row, tl.where(finite, token, -1), mask=mask)


def keep_tokens(kept: Tensor, last_tokens: Tensor, token_ids: Tensor, largest: Tensor, slots: Tensor) -> None:
    """Note each row's token as its slot's last one, and in `kept`, where a row whose largest logit is not finite gets
    -1. Everything is int64 [rows] but `largest`, float32; slots differ, except those of padded rows.
    """
    rows = len(token_ids)
    _keep_tokens_kernel[(triton.cdiv(rows, _LANES),)](
        kept, last_tokens, token_ids, largest, slots, rows, LANES=_LANES, num_warps=1, **chained(kept.device)
    )
