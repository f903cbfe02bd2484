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


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of a step on the host, packed in order: what StepBatch has on the device.

    Token ids at `on_device` are not known here: they are the last tokens of `from_slots`. `write_index` and `tables`
    have an entry per KV group; tables are as wide as the longest row needs.
    """

    token_ids: NDArray[np.int64]
    on_device: NDArray[np.int64]
    from_slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    row_starts: NDArray[np.int64]
    row_ends: NDArray[np.int64]
    kv_lens: NDArray[np.int32]
    write_index: list[NDArray[np.int64]]
    tables: list[NDArray[np.int32]]
    writes_null: bool


def pack_rows(rows: Sequence[Row], slots: SlotTables, block_size: int) -> PackedRows:
    counts = np.array([row.count for row in rows], np.int64)
    ends = counts.cumsum()
    starts = ends - counts
    row_of = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(int(ends[-1])) - np.repeat(starts - np.array([row.start for row in rows]), counts)
    kept = positions >= np.repeat(np.array([row.write_start for row in rows]), counts)
    kv_lens = [row.start + row.count for row in rows]
    row_slots = [row.slot for row in rows]
    tables = [table[row_slots, : -(-max(kv_lens) // block_size)] for table in slots.block_tables]
    blocks = [table[row_of, positions // block_size].astype(np.int64) * kept for table in tables]
    token_ids, on_device, from_slots = _host_ids(rows, starts, positions.size)
    return PackedRows(
        token_ids=token_ids,
        on_device=on_device,
        from_slots=from_slots,
        positions=positions,
        row_starts=starts,
        row_ends=ends,
        kv_lens=np.array(kv_lens, np.int32),
        write_index=[block * block_size + positions % block_size for block in blocks],
        tables=tables,
        writes_null=not bool(kept.all()),
    )


def build_step_batch(packed: PackedRows, slots: SlotTables, block_size: int, staging: Staging) -> StepBatch:
    """Send packed rows in one copy. Tokens that only the device knows are read from `slots.last_tokens` there."""
    tokens, groups = packed.positions.size, len(packed.tables)
    ids, at, sources, positions, query_starts, kv_lens, *by_group = staging.to_device(
        packed.token_ids,
        packed.on_device,
        packed.from_slots,
        packed.positions,
        np.append(packed.row_starts, tokens).astype(np.int32),
        packed.kv_lens,
        *packed.write_index,
        *packed.tables,
    )
    if len(packed.on_device) == tokens:
        ids = slots.last_tokens[sources]
    elif len(packed.on_device):
        ids[at] = slots.last_tokens[sources]
    query_lens, host_kv_lens = (packed.row_ends - packed.row_starts).tolist(), packed.kv_lens.tolist()
    batches = tuple(
        AttentionBatch(
            positions=positions,
            write_index=write_index,
            block_tables=block_tables,
            query_starts=query_starts,
            kv_lens=kv_lens,
            host_query_lens=tuple(query_lens),
            host_kv_lens=tuple(host_kv_lens),
            block_size=block_size,
        )
        for write_index, block_tables in zip(by_group[:groups], by_group[groups:], strict=True)
    )
    return StepBatch(ids, batches, packed.row_ends, packed.writes_null)


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
