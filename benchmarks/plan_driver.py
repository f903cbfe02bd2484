"""Drives a runner with plans of its own: sequences, blocks and chunks without a scheduler, and the logits in between.

For accuracy and speed of the runner alone. It hands out blocks from one counter and never preempts by itself: what it
does to a sequence is what the caller says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.attention.base import AttentionBatch
from engine.loader.load import LoadedModel
from engine.models.base import Model
from engine.plan import NewSlot, Row, RowResult, StepPlan
from engine.protocol import KVGroupSpec, SamplingParams
from engine.runner.kv_cache import KVCache
from engine.runner.runner import TorchRunner
from engine.sampler.masks import RowMasks

GREEDY = SamplingParams(temperature=0.0, seed=0)


class LogitsTap:
    """A model that keeps the logits it computed since `take`, in order."""

    def __init__(self, model: Model, keep: bool = True) -> None:
        self._model, self._keep = model, keep
        self._kept: list[Tensor] = []

    def __call__(
        self, token_ids: Tensor, batches: Sequence[AttentionBatch], caches: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        return self._model(token_ids, batches, caches)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = self._model.compute_logits(hidden)
        if self._keep:
            self._kept.append(logits.clone())
        return logits

    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        return self._model.kv_groups()

    def named_parts(self) -> Iterator[tuple[str, Tensor]]:
        return self._model.named_parts()

    def take(self) -> Tensor:
        """Return [rows, vocab] of everything since the last call."""
        kept, self._kept = self._kept, []
        return torch.cat(kept)

    def clear(self) -> None:
        self._kept.clear()


@dataclass(eq=False, slots=True)
class DrivenSequence:
    """Tokens of one sequence, its slot and blocks; KV of the first `computed` tokens is in the cache."""

    slot: int
    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    sent_blocks: int = 0
    write_start: int = 0
    setup: list[NewSlot] = field(default_factory=list)


class PlanDriver:
    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int = 64,
        max_slots: int = 64,
        max_in_flight: int = 1,
        keep: bool = True,
    ) -> None:
        self.tap = LogitsTap(loaded.module, keep)
        self.block_size = block_size
        # All groups use the same block numbers, and nothing behind a window is ever given back.
        self._groups = len(loaded.kv_groups)
        self.cache = KVCache(loaded.kv_groups, (num_blocks,) * self._groups, block_size, loaded.kv_dtype, loaded.device)
        self.runner = TorchRunner(
            self.tap,
            self.cache,
            block_size=block_size,
            max_slots=max_slots,
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.vocab_size,
            device=loaded.device,
            max_in_flight=max_in_flight,
        )
        self._free_blocks = list(range(num_blocks - 1, 0, -1))
        self._free_slots = list(range(max_slots - 1, -1, -1))
        self._freed_slots: list[int] = []
        self._step = 0

    def open(
        self,
        tokens: Sequence[int],
        *,
        sampling: SamplingParams = GREEDY,
        prompt_logprobs: int | None = None,
        cached: DrivenSequence | None = None,
        cached_tokens: int = 0,
    ) -> DrivenSequence:
        """Start a sequence, perhaps behind the first `cached_tokens` (full blocks) of another that is still open."""
        shared = cached.blocks[: cached_tokens // self.block_size] if cached is not None else []
        sequence = DrivenSequence(self._free_slots.pop(), list(tokens), list(shared))
        sequence.computed = min(len(shared) * self.block_size, len(tokens) - 1)
        sequence.write_start = len(shared) * self.block_size
        sequence.setup.append(NewSlot(sequence.slot, len(tokens), sampling, (), prompt_logprobs))
        return sequence

    def close(self, sequence: DrivenSequence, *, shared_blocks: int = 0) -> None:
        """Give slot and blocks back, except the first `shared_blocks`. Blocks are handed out again at once."""
        self._free_blocks += sequence.blocks[shared_blocks:]
        self._free_slots.append(sequence.slot)
        self._freed_slots.append(sequence.slot)

    def step(
        self, wanted: Sequence[tuple[DrivenSequence, int]], *, on_device: bool = False, masks: RowMasks | None = None
    ) -> list[RowResult]:
        """Compute the next `count` tokens of each sequence; one that reaches its end samples and grows by the token.

        With `on_device` rows of one token are decode rows whose token the runner has itself. `masks` are for some of
        the rows, which sample.
        """
        self.launch(wanted, on_device=on_device, masks=masks)
        (result,) = self.runner.collect(block=True)
        for (sequence, _), row in zip(wanted, result.rows, strict=True):
            sequence.tokens += row.token_ids
        return list(result.rows)

    def launch(
        self, wanted: Sequence[tuple[DrivenSequence, int]], *, on_device: bool = False, masks: RowMasks | None = None
    ) -> None:
        """Send a step without waiting. Several in flight need `on_device`, and their tokens come with `collect`."""
        new_slots = tuple(setup for sequence, _ in wanted for setup in sequence.setup)
        grammar_rows = {} if masks is None else {row: place for place, row in enumerate(masks.rows)}
        rows = tuple(
            self._row(sequence, count, on_device, grammar_rows.get(index))
            for index, (sequence, count) in enumerate(wanted)
        )
        plan = StepPlan(self._step, rows, new_slots, tuple(self._freed_slots), len(grammar_rows))
        self._step += 1
        self._freed_slots = []
        self.runner.launch(plan)
        if masks is not None:
            self.runner.choose(masks.words.tobytes())

    def prefill(self, sequence: DrivenSequence, chunk: int) -> RowResult:
        """Compute the rest of a sequence in chunks; return the last row's result."""
        while True:
            count = min(chunk, len(sequence.tokens) - sequence.computed)
            at_end = sequence.computed + count == len(sequence.tokens)
            (result,) = self.step([(sequence, count)])
            if at_end:
                return result

    def all_logits(self, tokens: Sequence[int], chunk: int) -> Tensor:
        """Return [len(tokens), vocab]: the logits behind every token of a sequence that is prefilled in chunks."""
        sequence = self.open(tokens, prompt_logprobs=0)
        self.tap.clear()
        self.prefill(sequence, chunk)
        self.close(sequence)
        return self.tap.take()

    def _row(self, sequence: DrivenSequence, count: int, on_device: bool, grammar_row: int | None) -> Row:
        start, end = sequence.computed, sequence.computed + count
        while len(sequence.blocks) * self.block_size < end:
            sequence.blocks.append(self._free_blocks.pop())
        new_blocks = tuple(sequence.blocks[sequence.sent_blocks :])
        known = sequence.tokens[start:end]
        row = Row(
            slot=sequence.slot,
            start=start,
            count=count,
            sample=end >= len(sequence.tokens),
            new_blocks=(new_blocks,) * self._groups,
            token_ids=None if on_device and count == 1 else tuple(known),
            write_start=sequence.write_start if sequence.write_start > start else 0,
            grammar_row=grammar_row,
            next_id=sequence.tokens[end] if end < len(sequence.tokens) else None,
        )
        sequence.sent_blocks = len(sequence.blocks)
        sequence.computed = end
        sequence.setup = []
        return row
