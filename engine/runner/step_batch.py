"""Turns the rows of a plan into the tensors of one forward pass. Knows slots and positions, no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBatch
from engine.plan import Row
from engine.runner.slots import SlotTables
from engine.runner.staging import Staging


@dataclass(frozen=True, slots=True)
class StepBatch:
    """`row_ends[i]` - 1 is the token whose logits row i samples from. `writes_null`: some KV goes to the null block."""

    token_ids: Tensor
    groups: tuple[AttentionBatch, ...]
    row_ends: NDArray[np.int64]
    writes_null: bool


def build_step_batch(rows: Sequence[Row], slots: SlotTables, block_size: int, staging: Staging) -> StepBatch:
    """Pack the rows' tokens in order. Tokens that only the device knows are read from `slots.last_tokens` there."""
    counts = np.array([row.count for row in rows], np.int64)
    ends = counts.cumsum()
    starts = ends - counts
    row_of = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(int(ends[-1])) - np.repeat(starts - np.array([row.start for row in rows]), counts)
    kept = positions >= np.repeat(np.array([row.write_start for row in rows]), counts)
    kv_lens = [row.start + row.count for row in rows]
    blocks = [table[[row.slot for row in rows], : -(-max(kv_lens) // block_size)] for table in slots.block_tables]
    write_blocks = [table[row_of, positions // block_size].astype(np.int64) * kept for table in blocks]
    host_ids, on_device, from_slots = _host_ids(rows, starts, positions.size)
    # Everything in one copy.
    ids, at, sources, positions_there, query_starts, lens, *by_group = staging.to_device(
        host_ids,
        on_device,
        from_slots,
        positions,
        np.append(starts, positions.size).astype(np.int32),
        np.array(kv_lens, np.int32),
        *(write_block * block_size + positions % block_size for write_block in write_blocks),
        *blocks,
    )
    groups = tuple(
        AttentionBatch(
            positions=positions_there,
            write_index=write_index,
            block_tables=block_tables,
            query_starts=query_starts,
            kv_lens=lens,
            host_query_lens=tuple(row.count for row in rows),
            host_kv_lens=tuple(kv_lens),
            block_size=block_size,
        )
        for write_index, block_tables in zip(by_group[: len(blocks)], by_group[len(blocks) :], strict=True)
    )
    if len(on_device) == positions.size:
        ids = slots.last_tokens[sources]
    elif len(on_device):
        ids[at] = slots.last_tokens[sources]
    return StepBatch(ids, groups, ends, not bool(kept.all()))


def _host_ids(
    rows: Sequence[Row], starts: NDArray[np.int64], tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the step's token ids, and for those that are still on the device their places and their slots."""
    host = np.zeros(tokens, np.int64)
    on_device, from_slots = [], []
    for row, start in zip(rows, starts.tolist(), strict=True):
        if row.token_ids is None:
            on_device.append(start)
            from_slots.append(row.slot)
        else:
            host[start : start + row.count] = row.token_ids
    return host, np.array(on_device, np.int64), np.array(from_slots, np.int64)
