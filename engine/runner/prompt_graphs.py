"""Steps with prompts in them as CUDA graphs: those of few tokens, whose launches would cost more than computing them,
and those that are full, as long prompts and many prompts bring them one after another.

A step is captured per (tokens, rows, width of the block table) and padded in all three: a padded token belongs to no
row and writes to the null block, a padded row has no tokens. Rows may be of any kind (chunks, whole prompts, tails
behind cached prefixes, decode rows among them). What a padded token computes is garbage that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBatch
from engine.kernels.decode import keep_tokens
from engine.kernels.sampling import choose_tokens
from engine.models.base import Model
from engine.plan import Row
from engine.runner.decode_graphs import MAX_TABLE_TOKENS, table_widths
from engine.runner.graph import GraphedStep
from engine.runner.slots import SlotTables
from engine.runner.staging import Staging
from engine.runner.step_batch import PackedRows
from engine.sampler.noise import Purpose, noise_keys
from engine.sampler.sampler import Sampler

TOKEN_BUCKETS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
"""Beyond the last, padding costs more than it saves: a step keeps the GPU busy for longer than its launches take."""

FULL_STEP_SHARE = 0.95
"""A step with this share of all tokens that a step may have is as good as full."""

MAX_FULL_STEP_TOKENS = 1 << 14

FULL_STEP_FREE_BYTES = 8 << 30
"""A full step's graph keeps its activations. It is captured where this much of the device is free."""

ROW_BUCKETS = (8, 64)

_EVERY_LENGTH = tuple(range(1, 129))
"""A back end plans its launches by the rows' lengths; a captured step is to serve all of them."""


@dataclass(frozen=True, slots=True)
class _Shape:
    tokens: int
    rows: int
    width: int


class _Sections:
    """Where a shape's numbers are in the one copy that brings them: int32 words, all at multiples of 16 bytes."""

    def __init__(self, shape: _Shape, groups: int) -> None:
        tokens, rows = shape.tokens, shape.rows
        sizes = {
            "token_ids": 2 * tokens,
            "sources": 2 * tokens,
            "positions": 2 * tokens,
            "write_index": 2 * groups * tokens,
            "last": 2 * rows,
            "slots": 2 * rows,
            "query_starts": rows + 4,
            "kv_lens": rows,
            "keys": 2 * rows,
            "temperatures": rows,
            "tables": groups * rows * shape.width,
        }
        self.slices: dict[str, slice] = {}
        self.words = 0
        for name, size in sizes.items():
            self.slices[name] = slice(self.words, self.words + size)
            self.words += size

    def host(self, sent: NDArray[np.int32], name: str, dtype: type) -> NDArray[np.int64]:
        return sent[self.slices[name]].view(dtype)

    def device(self, sent: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        return sent[self.slices[name]].view(dtype)


class _Step(GraphedStep):
    """One shape's step."""

    def __init__(
        self,
        model: Model,
        caches: Sequence[tuple[Tensor, Tensor]],
        shape: _Shape,
        sent: Tensor,
        kept: Tensor,
        last_tokens: Tensor,
        *,
        groups: int,
        block_size: int,
        vocab_size: int,
    ) -> None:
        super().__init__(self._run)
        self._model, self._caches, self._kept, self._last_tokens = model, caches, kept[: shape.rows], last_tokens
        self._vocab_size = vocab_size
        self.sections = _Sections(shape, groups)

        def section(name: str, dtype: torch.dtype) -> Tensor:
            return self.sections.device(sent, name, dtype)

        self._token_ids, self._sources = section("token_ids", torch.int64), section("sources", torch.int64)
        self._last, self._slots = section("last", torch.int64), section("slots", torch.int64)
        self._keys = section("keys", torch.int32).view(shape.rows, 2)
        self._temperatures = section("temperatures", torch.float32)
        tables = section("tables", torch.int32).view(groups, shape.rows, shape.width)
        write_index = section("write_index", torch.int64).view(groups, shape.tokens)
        self._batches = [
            AttentionBatch(
                positions=section("positions", torch.int64),
                write_index=write_index[group],
                block_tables=tables[group],
                query_starts=section("query_starts", torch.int32)[: shape.rows + 1],
                kv_lens=section("kv_lens", torch.int32),
                host_query_lens=(*_EVERY_LENGTH, shape.tokens + len(_EVERY_LENGTH)),
                host_kv_lens=(shape.width * block_size,),
                block_size=block_size,
            )
            for group in range(groups)
        ]

    def _run(self) -> Tensor:
        known = self._last_tokens[self._sources.clamp(min=0)]
        token_ids = torch.where(self._sources >= 0, known, self._token_ids)
        hidden = self._model(token_ids, self._batches, self._caches)
        logits = self._model.compute_logits(hidden[self._last])
        chosen, largest = choose_tokens(logits, self._temperatures, self._keys, self._vocab_size)
        keep_tokens(self._kept, self._last_tokens, chosen, largest, self._slots)
        return logits


class PromptGraphs:
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
        max_step_tokens: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._sampler, self._staging, self._pad_slot = sampler, staging, max_slots
        self._full_tokens = _full_step_tokens(max_step_tokens, device)
        buckets = TOKEN_BUCKETS if self._full_tokens is None else (*TOKEN_BUCKETS, self._full_tokens)
        self._widths = table_widths(max_blocks, block_size)
        shapes = [
            _Shape(tokens, rows, width)
            for width in reversed(self._widths)
            for rows in ROW_BUCKETS
            for tokens in reversed(buckets)
            # A few rows hardly notice how wide the table is.
            if (rows > ROW_BUCKETS[0] or width == self._widths[-1]) and rows * width * block_size <= MAX_TABLE_TOKENS
        ]
        groups = len(slots.block_tables)
        words = max((_Sections(shape, groups).words for shape in shapes), default=0)
        self._sent = torch.zeros(words, dtype=torch.int32, device=device)
        self._host = np.zeros(words, np.int32)
        self._kept = torch.zeros(ROW_BUCKETS[-1], dtype=torch.int64, device=device)
        self._steps = {
            shape: _Step(
                model,
                caches,
                shape,
                self._sent,
                self._kept,
                slots.last_tokens,
                groups=groups,
                block_size=block_size,
                vocab_size=vocab_size,
            )
            for shape in shapes
        }

    def rehearse(self) -> None:
        """Run all shapes for the sake of their launches alone."""
        for shape, step in self._steps.items():
            self._send(None, (), shape, step)
            step.rehearse()

    def capture(self, pool: object, stream: torch.cuda.Stream, on_progress: Callable[[float, str], None]) -> None:
        """Capture all shapes, padded all over: nothing is read or written that a request has."""
        for done, (shape, step) in enumerate(self._steps.items()):
            on_progress(done / len(self._steps), "capturing prompt steps")
            with torch.cuda.stream(stream):
                self._send(None, (), shape, step)
                step()
            step.capture(pool, stream)

    def launch(self, packed: PackedRows, rows: Sequence[Row]) -> tuple[Tensor, Tensor] | None:
        """Compute the step; return the tokens (int64 [rows], -1 where logits are not finite) and the logits of each
        row's last position, valid until the next step. None when no shape fits: nothing has happened then.
        """
        width = packed.tables[0].shape[1]
        shape = _Shape(
            self._token_bucket(packed.positions.size),
            next((bucket for bucket in ROW_BUCKETS if bucket >= len(rows)), 0),
            next(known for known in self._widths if known >= width),
        )
        if shape.rows == ROW_BUCKETS[0]:
            shape = _Shape(shape.tokens, shape.rows, self._widths[-1])
        step = self._steps.get(shape)
        if step is None:
            return None
        self._send(packed, rows, shape, step)
        step()
        return self._kept[: len(rows)], step.logits[: len(rows)]

    def _token_bucket(self, tokens: int) -> int:
        """Return the tokens of the step that takes so many, 0 without one."""
        full = self._full_tokens
        if full is not None and FULL_STEP_SHARE * full <= tokens <= full:
            return full
        return next((bucket for bucket in TOKEN_BUCKETS if bucket >= tokens), 0)

    def _send(self, packed: PackedRows | None, rows: Sequence[Row], shape: _Shape, step: _Step) -> None:
        sent = self._host[: step.sections.words]
        sent[:] = 0
        long = {name: step.sections.host(sent, name, np.int64) for name in ("token_ids", "sources", "last", "slots")}
        long["sources"][:] = -1
        long["slots"][:] = self._pad_slot
        if packed is not None:
            self._fill(packed, rows, shape, step.sections, sent, long)
        self._staging.fill(self._sent, sent)

    def _fill(
        self,
        packed: PackedRows,
        rows: Sequence[Row],
        shape: _Shape,
        sections: _Sections,
        sent: NDArray[np.int32],
        long: dict[str, NDArray[np.int64]],
    ) -> None:
        tokens, count = packed.positions.size, len(rows)
        long["token_ids"][:tokens] = packed.token_ids
        long["sources"][packed.on_device] = packed.from_slots
        long["last"][:count] = packed.row_ends - 1
        slots = np.array([row.slot for row in rows], np.int64)
        # A row that does not sample keeps no token.
        long["slots"][:count] = np.where([row.sample for row in rows], slots, self._pad_slot)
        sections.host(sent, "positions", np.int64)[:tokens] = packed.positions
        starts = sent[sections.slices["query_starts"]]
        starts[:count] = packed.row_starts
        starts[count:] = tokens
        sent[sections.slices["kv_lens"]][:count] = packed.kv_lens
        seeds = self._sampler.seeds(slots)
        keys = noise_keys(seeds, packed.kv_lens.tolist(), Purpose.TARGET).numpy()
        sent[sections.slices["keys"]].reshape(-1, 2)[:count] = keys
        temperatures = self._sampler.kernel_rows(slots)[2]
        sent[sections.slices["temperatures"]][:count] = temperatures.view(np.int32)
        write_index = sections.host(sent, "write_index", np.int64).reshape(-1, shape.tokens)
        tables = sent[sections.slices["tables"]].reshape(-1, shape.rows, shape.width)
        for group, (index, table) in enumerate(zip(packed.write_index, packed.tables, strict=True)):
            write_index[group, :tokens] = index
            tables[group, :count, : table.shape[1]] = table


def _full_step_tokens(max_step_tokens: int, device: torch.device) -> int | None:
    """Return the tokens of a full step if it is to have a graph of its own."""
    if not TOKEN_BUCKETS[-1] < max_step_tokens <= MAX_FULL_STEP_TOKENS:
        return None
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < FULL_STEP_FREE_BYTES:
        return None
    return max_step_tokens
