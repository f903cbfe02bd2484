"""Order of a row's logits: larger values first, equal values by the lower token id. It knows no sampling parameters.

Everything here is decided row by row and compares values only, so a row's result does not depend on its neighbours,
on the number of threads, or on how much of the row had to be sorted to find it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NARROW = 128
"""How much of a row is ranked first: it has slack for usual top_k, since ties are frequent among bfloat16 logits."""

_ARGMAX_BLOCK = 256
_LARGEST_ID = 0xFFFFFFFF


class Ranked(NamedTuple):
    """The largest entries of each row in order: logits in their own dtype and int64 ids, both [rows, n]."""

    logits: Tensor
    ids: Tensor


def first_argmax(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest value of each row of [rows, n] and its lowest index. NaN counts as largest.

    On the CPU torch's amax is vectorised and its argmax is not: the maxima of blocks come first, then the argmax over
    them, then the argmax inside one block. Both argmaxes take the first of equals, hence so does the whole.
    """
    blocks, rest = divmod(values.shape[1], _ARGMAX_BLOCK)
    if values.device.type != "cpu" or rest or blocks < 2:
        index = values.argmax(dim=1, keepdim=True)
    else:
        blocked = values.view(len(values), blocks, _ARGMAX_BLOCK)
        block = blocked.amax(dim=2).argmax(dim=1, keepdim=True)
        inside = blocked.gather(1, block[:, :, None].expand(-1, -1, _ARGMAX_BLOCK)).squeeze(1)
        index = block * _ARGMAX_BLOCK + inside.argmax(dim=1, keepdim=True)
    return values.gather(1, index).squeeze(1), index.squeeze(1)


def rank(logits: Tensor, width: int) -> Ranked:
    """Return `width` largest entries of each row of [rows, n] in order.

    Of the entries that equal the last value, which ones are among them may be arbitrary, except that all are when
    `width` is n: use only what is strictly larger, or see that the next value differs.
    """
    if logits.device.type == "cpu" and width > NARROW:
        ids = _rank_by_keys(logits, width)
        return Ranked(logits.gather(1, ids), ids)
    if width >= logits.shape[1]:
        everything, ids = logits.sort(dim=1, descending=True, stable=True)
        return Ranked(everything, ids)
    _, by_value = logits.topk(width, dim=1)
    ids = by_value.sort(dim=1).values
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return Ranked(values, ids.gather(1, order))


def _rank_by_keys(logits: Tensor, width: int) -> Tensor:
    """Return the ids of `rank` through integers that order as (value, -id) do: numpy partitions and sorts those with
    vector instructions, ten times as fast as torch sorts floats with their indices.
    """
    rows, vocab = logits.shape
    ascending = np.empty((rows, width), dtype=np.int64)
    inverse_ids = _LARGEST_ID - np.arange(vocab, dtype=np.int64)
    for row in range(rows):  # a row at a time stays in the cache
        bits = (logits[row].to(torch.float32) + 0.0).numpy().view(np.int32)  # + 0.0: -0.0 becomes 0.0
        # Floats order as their bits do when those of negative ones are flipped below the sign.
        keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64) << 32) | inverse_ids
        if width < vocab:
            keys.partition(vocab - width)
        ascending[row] = keys[vocab - width :]
    ascending.sort(axis=1)
    return torch.from_numpy(_LARGEST_ID - (ascending[:, ::-1] & _LARGEST_ID))


def largest(logits: Tensor, count: int) -> Ranked:
    """Return the `count` largest entries of each row in order, exactly."""
    rows, vocab = logits.shape
    count = min(count, vocab)
    values = logits.new_empty((rows, count))
    ids = torch.empty((rows, count), dtype=torch.int64, device=logits.device)
    pending = torch.arange(rows, device=logits.device)
    for width in rank_widths(vocab):
        if width <= count < vocab:
            continue
        found = rank(take_rows(logits, pending), width)
        done = is_exact(found, torch.full_like(pending, count), vocab)
        values[pending[done]] = found.logits[done, :count]
        ids[pending[done]] = found.ids[done, :count]
        pending = pending[~done]
        if not len(pending):
            break
    return Ranked(values, ids)


def ranks_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return the place of `token_ids` [rows] in the order of each row of [rows, n], 1 for the first: int64 [rows]."""
    if logits.device.type != "cpu":
        return ranks_at_once(logits, token_ids)
    # One comparison for each entry, and numpy counts fifty times as fast as torch.
    ranks = []
    for row, token_id in zip(logits, token_ids.tolist(), strict=True):
        before = np.count_nonzero((row[:token_id] >= row[token_id]).numpy())
        ranks.append(1 + before + np.count_nonzero((row[token_id:] > row[token_id]).numpy()))
    return torch.tensor(ranks, dtype=torch.int64)


def ranks_at_once(logits: Tensor, token_ids: Tensor) -> Tensor:
    """`ranks_of` without a loop over rows, and without waiting for the device."""
    own = logits.gather(1, token_ids[:, None])
    lower = torch.arange(logits.shape[1], device=logits.device) < token_ids[:, None]
    return 1 + ((logits > own) | ((logits == own) & lower)).sum(dim=1)


def is_exact(found: Ranked, counts: Tensor, vocab: int) -> Tensor:
    """Tell for each row whether its first `counts` entries are surely the row's largest, ties included."""
    if found.logits.shape[1] == vocab:
        return torch.ones_like(counts, dtype=torch.bool)
    return found.logits.gather(1, counts[:, None] - 1).squeeze(1) > found.logits[:, -1]


def rank_widths(vocab: int) -> list[int]:
    """How much of a row to rank, in turn, until it suffices."""
    return [width for width in (NARROW, 4096) if width < vocab] + [vocab]


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Return `values[rows]` without a copy when that is all rows (`rows` ascends)."""
    return values if len(rows) == len(values) else values[rows]
