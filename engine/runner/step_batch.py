"""Turns the rows of a plan into the tensors of one forward pass. Knows slots and positions, no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBatch
from engine.plan import Row
from engine.runner.slots import SlotTables


@dataclass(frozen=True, slots=True)
class StepBatch:
    """`row_ends[i]` - 1 is the token whose logits row i samples from. `writes_null`: some KV goes to the null block."""

    token_ids: Tensor
    groups: tuple[AttentionBatch, ...]
    row_ends: NDArray[np.int64]
    writes_null: bool


def build_step_batch(rows: Sequence[Row], slots: SlotTables, block_size: int, device: torch.device) -> StepBatch:
    """Pack the rows' tokens in order. Tokens that only the device knows are read from `slots.last_tokens` there."""
    counts = np.array([row.count for row in rows], np.int64)
    ends = counts.cumsum()
    starts = ends - counts
    row_of = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(int(ends[-1])) - np.repeat(starts - np.array([row.start for row in rows]), counts)
    kept = positions >= np.repeat(np.array([row.write_start for row in rows]), counts)
    groups = tuple(
        _attention_batch(rows, table, positions, row_of, kept, starts, block_size, device)
        for table in slots.block_tables
    )
    return StepBatch(_token_ids(rows, starts, int(ends[-1]), slots, device), groups, ends, not bool(kept.all()))


def _token_ids(
    rows: Sequence[Row], starts: NDArray[np.int64], tokens: int, slots: SlotTables, device: torch.device
) -> Tensor:
    host = np.zeros(tokens, np.int64)
    on_device, from_slots = [], []
    for row, start in zip(rows, starts.tolist(), strict=True):
        if row.token_ids is None:
            on_device.append(start)
            from_slots.append(row.slot)
        else:
            host[start : start + row.count] = row.token_ids
    token_ids = torch.from_numpy(host).to(device, non_blocking=True)
    if len(on_device) == tokens:
        return slots.last_tokens[_index(from_slots, device)]
    if on_device:
        token_ids[_index(on_device, device)] = slots.last_tokens[_index(from_slots, device)]
    return token_ids


def _attention_batch(
    rows: Sequence[Row],
    table: NDArray[np.int32],
    positions: NDArray[np.int64],
    row_of: NDArray[np.int64],
    kept: NDArray[np.bool_],
    starts: NDArray[np.int64],
    block_size: int,
    device: torch.device,
) -> AttentionBatch:
    kv_lens = [row.start + row.count for row in rows]
    blocks = table[[row.slot for row in rows], : -(-max(kv_lens) // block_size)]
    write_block = blocks[row_of, positions // block_size].astype(np.int64) * kept
    query_starts = np.append(starts, positions.size).astype(np.int32)
    return AttentionBatch(
        positions=torch.from_numpy(positions).to(device, non_blocking=True),
        write_index=torch.from_numpy(write_block * block_size + positions % block_size).to(device, non_blocking=True),
        block_tables=torch.from_numpy(blocks).to(device, non_blocking=True),
        query_starts=torch.from_numpy(query_starts).to(device, non_blocking=True),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32).to(device, non_blocking=True),
        host_query_lens=tuple(row.count for row in rows),
        host_kv_lens=tuple(kv_lens),
        block_size=block_size,
    )


def _index(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)
