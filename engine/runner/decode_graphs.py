"""Decode steps as CUDA graphs: every row has one token, the one it sampled last, and that is on the device.

A step is captured once per (rows, width of the block table), from the tokens' embedding to the choice of the next ones;
replaying it costs the host one copy and one launch. Rows are padded to the next captured number: a padded row attends
over nothing, writes to the null block and keeps its token in a slot that nobody has.

`max_slots` is that slot. All tensors that a graph reads keep their place, so graphs share one set, cut to their size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBatch
from engine.kernels.decode import HEADER_COLUMNS, decode_inputs, keep_tokens
from engine.kernels.sampling import choose_tokens
from engine.models.base import Model
from engine.plan import Row
from engine.runner.graph import GraphedStep
from engine.runner.slots import SlotTables
from engine.runner.staging import Staging
from engine.sampler.sampler import Sampler

MAX_ROWS = 256
MAX_TABLE_TOKENS = 1 << 22
"""Rows times tokens of the widest table: what attention keeps of its splits grows with it, to a quarter of a gigabyte
for an 8B model. Larger steps spend milliseconds on KV and run without a graph."""

_HEADER_ROWS = 8
"""The header's columns and some unused ones, so that tables begin at a multiple of 16 bytes for any number of rows."""

_SHORT_TABLE_TOKENS = 2048


def row_buckets(max_rows: int) -> list[int]:
    """Return the numbers of rows that are captured, ascending; the last is at least `max_rows`, up to MAX_ROWS."""
    buckets = [1, 2, 4, 8, *range(16, 64, 8), *range(64, MAX_ROWS + 1, 16)]
    enough = next((count for count, bucket in enumerate(buckets) if bucket >= max_rows), len(buckets) - 1)
    return buckets[: enough + 1]


def table_widths(max_blocks: int, block_size: int) -> list[int]:
    """Return the widths of block tables that are captured, in blocks: multiples of 4, each four times the one before.

    Programs of the attention kernel beyond a row's length return at once, but a million of them take their time.
    """
    most = -(-max_blocks // 4) * 4
    widths, width = [], max(_SHORT_TABLE_TOKENS // block_size, 4)
    while width < most:
        widths.append(width)
        width *= 4
    return [*widths, most]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Slots of a decode step and the positions of their tokens, int64 [rows] on the host."""

    slots: NDArray[np.int64]
    positions: NDArray[np.int64]


NOBODY = DecodeRows(np.zeros(0, np.int64), np.zeros(0, np.int64))


class _Inputs:
    """What the host writes and what the first kernel makes of it, for the largest shape."""

    def __init__(self, max_rows: int, max_ints: int, groups: int, device: torch.device) -> None:
        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.sent = empty(max_ints, dtype=torch.int32)
        self.token_ids = empty(max_rows, dtype=torch.int64)
        self.positions = empty(max_rows, dtype=torch.int64)
        self.kv_lens = empty(max_rows, dtype=torch.int32)
        self.write_index = empty(groups, max_rows, dtype=torch.int64)
        self.slots = empty(max_rows, dtype=torch.int64)
        self.keys = empty(max_rows, 2, dtype=torch.int32)
        self.temperatures = empty(max_rows, dtype=torch.float32)
        self.kept = empty(max_rows, dtype=torch.int64)
        self.query_starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)


class _Step(GraphedStep):
    """One shape's step."""

    def __init__(
        self,
        model: Model,
        caches: Sequence[tuple[Tensor, Tensor]],
        inputs: _Inputs,
        last_tokens: Tensor,
        *,
        rows: int,
        width: int,
        groups: int,
        block_size: int,
        vocab_size: int,
    ) -> None:
        super().__init__(self._run)
        self._model, self._caches, self._inputs, self._last_tokens = model, caches, inputs, last_tokens
        self._rows, self._block_size, self._vocab_size = rows, block_size, vocab_size
        header_ints = _HEADER_ROWS * rows
        self._header = inputs.sent[:header_ints].view(_HEADER_ROWS, rows)
        tables = inputs.sent[header_ints : header_ints + groups * rows * width].view(groups, rows, width)
        self._batches = [
            AttentionBatch(
                positions=inputs.positions[:rows],
                write_index=inputs.write_index[group, :rows],
                block_tables=tables[group],
                query_starts=inputs.query_starts[: rows + 1],
                kv_lens=inputs.kv_lens[:rows],
                host_query_lens=(1,) * rows,
                host_kv_lens=(width * block_size,) * rows,
                block_size=block_size,
            )
            for group in range(groups)
        ]

    def _run(self) -> Tensor:
        inputs, rows = self._inputs, self._rows
        for batch in self._batches:  # per group only write_index differs
            decode_inputs(
                self._header,
                batch.block_tables,
                self._last_tokens,
                self._block_size,
                token_ids=inputs.token_ids[:rows],
                positions=batch.positions,
                kv_lens=batch.kv_lens,
                write_index=batch.write_index,
                slots=inputs.slots[:rows],
                keys=inputs.keys[:rows],
                temperatures=inputs.temperatures[:rows],
            )
        hidden = self._model(inputs.token_ids[:rows], self._batches, self._caches)
        logits = self._model.compute_logits(hidden)
        token_ids, largest = choose_tokens(logits, inputs.temperatures[:rows], inputs.keys[:rows], self._vocab_size)
        keep_tokens(inputs.kept[:rows], self._last_tokens, token_ids, largest, inputs.slots[:rows])
        return logits


class DecodeGraphs:
    """The captured shapes of one model on one device. On a CPU (the kernels' interpreter) steps are computed anew."""

    def __init__(
        self,
        model: Model,
        caches: Sequence[tuple[Tensor, Tensor]],
        slots: SlotTables,
        sampler: Sampler,
        staging: Staging,
        *,
        max_slots: int,
        max_blocks: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._slots, self._sampler, self._staging = slots, sampler, staging
        self._pad_slot, self._block_size = max_slots, block_size
        self._groups = len(slots.block_tables)
        self._row_buckets = row_buckets(max_slots)
        self._widths = table_widths(max_blocks, block_size)
        shapes = [
            (rows, width)
            for width in reversed(self._widths)
            for rows in reversed(self._row_buckets)
            if rows * width * block_size <= MAX_TABLE_TOKENS
        ]
        max_ints = max(self._ints(*shape) for shape in shapes)
        self._inputs = _Inputs(self._row_buckets[-1], max_ints, self._groups, device)
        self._host = np.zeros(max_ints, np.int32)
        self._steps = {
            (rows, width): _Step(
                model,
                caches,
                self._inputs,
                slots.last_tokens,
                rows=rows,
                width=width,
                groups=self._groups,
                block_size=block_size,
                vocab_size=vocab_size,
            )
            for rows, width in shapes
        }

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, blocks) of each step, the largest first: smaller ones find their memory in the pool."""
        return list(self._steps)

    def rehearse(self) -> None:
        """Run all shapes for the sake of their launches alone."""
        for shape, step in self._steps.items():
            self._send(NOBODY, *shape)
            step.rehearse()

    def capture(self, pool: object, stream: torch.cuda.Stream, on_progress: Callable[[float, str], None]) -> None:
        """Capture all shapes. Every row of theirs is padded, so nothing is read or written that a request has."""
        for done, (shape, step) in enumerate(self._steps.items()):
            on_progress(done / len(self._steps), "capturing decode steps")
            with torch.cuda.stream(stream):
                self._send(NOBODY, *shape)
                step()
            step.capture(pool, stream)

    def match(self, rows: Sequence[Row]) -> DecodeRows | None:
        """Return the rows of a plan when all of them are decode rows of a captured shape. Of drafts and grammars the
        caller knows better."""
        if len(rows) > self._row_buckets[-1] or any(row.token_ids is not None or row.write_start for row in rows):
            return None
        if not all(row.sample for row in rows):
            return None
        slots = np.array([row.slot for row in rows], np.int64)
        return DecodeRows(slots, np.array([row.start for row in rows], np.int64))

    def launch(self, rows: DecodeRows) -> tuple[Tensor, Tensor] | None:
        """Compute the step; return the tokens (int64 [rows], -1 where logits are not finite) and the logits. Both are
        valid until the next step. None when no shape fits: nothing has happened then.
        """
        count = len(rows.slots)
        blocks = int(rows.positions.max()) // self._block_size + 1
        width = next(width for width in self._widths if width >= blocks)
        bucket = next(bucket for bucket in self._row_buckets if bucket >= count)
        step = self._steps.get((bucket, width))
        if step is None:
            return None
        self._send(rows, bucket, width)
        step()
        return self._inputs.kept[:count], step.logits[:count]

    def _send(self, rows: DecodeRows, bucket: int, width: int) -> None:
        count, header_ints = len(rows.slots), _HEADER_ROWS * bucket
        sent = self._host[: self._ints(bucket, width)]
        header = sent[:header_ints].reshape(_HEADER_ROWS, bucket)
        low, high, temperatures = self._sampler.kernel_rows(rows.slots)
        columns = (rows.slots, rows.positions, low, high, temperatures.view(np.int32))
        padding = (self._pad_slot, -1, 0, 0, 0)
        for place, _ in enumerate(HEADER_COLUMNS):
            header[place, :count] = columns[place]
            header[place, count:] = padding[place]
        tables = sent[header_ints:].reshape(self._groups, bucket, width)
        for group, table in enumerate(self._slots.block_tables):
            known = min(width, table.shape[1])
            tables[group, :count, :known] = table[rows.slots, :known]
            tables[group, :count, known:] = 0
            tables[group, count:] = 0
        self._staging.fill(self._inputs.sent, sent)

    def _ints(self, rows: int, width: int) -> int:
        return rows * (_HEADER_ROWS + self._groups * width)
