"""Choosing a token in one launch: argmax of the logits, or of logits / T + Gumbel noise, over the whole vocabulary.

The noise is engine/sampler/noise.py's counter hash, integer for integer; ties go to the lower id. Each program takes a
stretch of one row and leaves its best entry; the one that arrives last chooses among them. Comparisons do not round,
so how the row is cut changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.chain import chained, wait

_PART = 1024
_WARPS = 4
_STRETCH = 2048
_LONG_STRETCH = 8192
_MANY_ROWS = 16
"""So many rows keep a device busy with long stretches, which have fewer ends to put together."""

MAX_ROWS = 1 << 13

_arrivals: dict[torch.device, Tensor] = {}


@triton.jit
def _mix(word):
    word = word ^ (word >> 16)
    word = word * 0x21F0AAAD
    word = word ^ (word >> 15)
    word = word * 0xD35A2D97
    return word ^ (word >> 15)


@triton.jit
def _gumbel(token, key_low, key_high):
    """Return float32 Gumbel numbers of uint32 token ids under one row's key."""
    word = (_mix(_mix(token) ^ key_low) ^ key_high) & 0x7FFFFFFF
    negative_uniform = (word.to(tl.int32).to(tl.float32) + 0.5) * -(2.0**-31)
    negative_uniform = tl.maximum(negative_uniform, -(1.0 - 2.0**-24))
    # log(1 + x) without losing small x: the rounding of 1 + x cancels in the quotient (Kahan).
    shifted = 1.0 + negative_uniform
    quotient = negative_uniform / tl.where(shifted == 1.0, 1.0, shifted - 1.0)
    log1p = tl.where(shifted == 1.0, negative_uniform, tl.log(shifted) * quotient)
    return -tl.log(-log1p)


@triton.jit
def _better(score, token, other_score, other_token):
    """Return the better of two entries: the higher score, or of equal ones the lower id."""
    takes_other = (other_score > score) | ((other_score == score) & (other_token < token))
    return tl.where(takes_other, other_score, score), tl.where(takes_other, other_token, token)


@triton.jit
def _choose_kernel(
    token_ids,
    largest,
    logits,
    temperatures,
    keys,
    best_scores,
    best_ids,
    best_logits,
    arrivals,
    stride_row,
    VOCAB: tl.constexpr,
    STRETCH: tl.constexpr,
    PART: tl.constexpr,
    STRETCHES: tl.constexpr,
    STRETCHES_PAD: tl.constexpr,
    CHAINED: tl.constexpr = False,
):
    """Grid (STRETCHES, rows)."""
    wait(CHAINED)
    stretch = tl.program_id(0)
    row = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    key_low = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
    key_high = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
    row_logits = logits + row.to(tl.int64) * stride_row
    # Each lane keeps its own best of all parts, so that the lanes are compared once.
    top = tl.full((PART,), float("-inf"), tl.float32)
    best = tl.full((PART,), float("-inf"), tl.float32)
    best_id = stretch * STRETCH + tl.arange(0, PART)
    broken = tl.zeros((PART,), tl.int32)
    for begin in range(0, STRETCH, PART):
        token = stretch * STRETCH + begin + tl.arange(0, PART)
        values = tl.load(row_logits + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        broken |= (values != values).to(tl.int32)
        top = tl.maximum(top, values)
        if temperature > 0.0:
            values = tl.div_rn(values, tl.zeros_like(values) + temperature) + _gumbel(
                token.to(tl.uint32), key_low, key_high
            )
        best_id = tl.where(values > best, token, best_id)
        best = tl.maximum(best, values)
    best_score, winner = tl.reduce((best, best_id), 0, _better)
    slot = row * STRETCHES + stretch
    tl.store(best_scores + slot, best_score)
    tl.store(best_ids + slot, winner)
    tl.store(best_logits + slot, tl.where(tl.max(broken, 0) > 0, float("nan"), tl.max(top, 0)))
    tl.debug_barrier()  # the three are stored before the row's counter says so
    if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == STRETCHES - 1:
        tl.debug_barrier()
        other = tl.arange(0, STRETCHES_PAD)
        other_mask = other < STRETCHES
        # .cg: what other multiprocessors stored must come from L2.
        at = row * STRETCHES + other
        scores = tl.load(best_scores + at, mask=other_mask, other=float("-inf"), cache_modifier=".cg")
        winner = tl.argmax(scores, 0, tie_break_left=True)
        tops = tl.load(best_logits + at, mask=other_mask, other=float("-inf"), cache_modifier=".cg")
        any_broken = tl.max((tops != tops).to(tl.int32), 0)
        tl.store(largest + row, tl.where(any_broken > 0, float("nan"), tl.max(tops, 0)))
        tl.store(token_ids + row, tl.load(best_ids + row * STRETCHES + winner, cache_modifier=".cg").to(tl.int64))
        tl.store(arrivals + row, 0)


def choose_tokens(logits: Tensor, temperatures: Tensor, keys: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return (token ids int64 [rows], largest logit float32 [rows]) of logits [rows, at least vocab_size].

    temperatures are float32 [rows], 0 for greedy; keys are `noise_keys`, int32 [rows, 2]. A row whose largest logit is
    not finite (NaN if any logit is) has no meaningful token, but its id is in range.
    """
    rows = logits.shape[0]
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows are more than {MAX_ROWS} in one launch")
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    largest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return token_ids, largest
    if logits.device not in _arrivals:
        _arrivals[logits.device] = torch.zeros(MAX_ROWS, dtype=torch.int32, device=logits.device)
    stretch = _STRETCH if rows < _MANY_ROWS else _LONG_STRETCH
    stretches = triton.cdiv(vocab_size, stretch)
    best_scores = torch.empty(rows, stretches, dtype=torch.float32, device=logits.device)
    _choose_kernel[(stretches, rows)](
        token_ids,
        largest,
        logits,
        temperatures,
        keys,
        best_scores,
        torch.empty_like(best_scores, dtype=torch.int32),
        torch.empty_like(best_scores),
        _arrivals[logits.device],
        logits.stride(0),
        VOCAB=vocab_size,
        STRETCH=stretch,
        PART=_PART,
        STRETCHES=stretches,
        STRETCHES_PAD=triton.next_power_of_2(stretches),
        num_warps=_WARPS,
        **chained(logits.device),
    )
    return token_ids, largest
