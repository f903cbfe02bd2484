"""Executes step plans on one device: slots, one forward pass, sampling, results in step order.

This file is the hot path. `launch` reads as the list of what happens in a step, in the order in which it must happen,
and nothing in it waits for the device or loops over tokens. What a step means is written in engine/plan.py; policy
(who runs, who waits) does not belong here, and neither does anything about one architecture or back end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.models.base import Model
from engine.plan import Row, RowResult, StepPlan, StepResult
from engine.protocol import TokenLogprobs
from engine.runner.kv_cache import KVCache
from engine.runner.slots import SlotTables
from engine.runner.step_batch import StepBatch, build_step_batch
from engine.sampler.sampler import Sampled, Sampler

PROMPT_LOGPROB_ROWS = 128
"""Logits of so many prompt positions exist at once: a row is as wide as the vocabulary."""


@dataclass(slots=True)
class _Launched:
    """A step whose results have not been collected. `sampled_rows` are plan rows, in the order of `sampled`."""

    plan: StepPlan
    started_s: float
    errors: dict[int, str]
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    sampled_rows: list[int] = field(default_factory=list)
    sampled: Sampled | None = None
    done: torch.cuda.Event | None = None
    compute_s: float | None = None


class TorchRunner:
    """`engine.plan.Runner` on a CPU or one CUDA device. On a CPU `launch` computes; results wait to be collected."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        *,
        block_size: int,
        max_slots: int,
        max_model_len: int,
        vocab_size: int,
        device: torch.device,
        max_in_flight: int = 1,
    ) -> None:
        groups = len(model.kv_groups())
        self._model, self._cache = model, cache
        self._slots = SlotTables(max_slots, -(-max_model_len // block_size), block_size, groups, device)
        self._sampler = Sampler(max_slots, vocab_size, device)
        self._block_size, self._vocab_size, self._device = block_size, vocab_size, device
        self._max_in_flight = max_in_flight
        self._launched: deque[_Launched] = deque()
        # Results are fetched on a stream of their own: on the main one they would queue behind the next step.
        self._fetch_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._fetch_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        started_s = time.perf_counter()
        for slot in plan.freed_slots:
            self._slots.free(slot)
        for new_slot in plan.new_slots:
            self._slots.take(new_slot)
            self._sampler.set_slot(new_slot)
        for row in plan.rows:
            for group, blocks in self._slots.append_blocks(row):
                self._cache.clear(group, blocks)
        launched = _Launched(plan, started_s, self._refused(plan.rows))
        indices = [index for index in range(len(plan.rows)) if index not in launched.errors]
        if indices:
            rows = [plan.rows[index] for index in indices]
            batch = build_step_batch(rows, self._slots, self._block_size, self._device)
            hidden = self._model(batch.token_ids, batch.groups, self._cache.layers)
            if batch.writes_null:
                self._cache.clear_null_block()
            self._score_prompts(launched, indices, batch, hidden)
            self._sample(launched, indices, batch, hidden)
        self._mark_end(launched)
        self._launched.append(launched)

    @torch.inference_mode()
    def collect(self, *, block: bool) -> Sequence[StepResult]:
        results: list[StepResult] = []
        while self._launched and (self._is_done(self._launched[0]) or (block and not results)):
            results.append(self._finish(self._launched.popleft()))
        return results

    def close(self) -> None:
        self._launched.clear()

    def _refused(self, rows: Sequence[Row]) -> dict[int, str]:
        """Return by plan row what cannot be computed; such a row ends its own request and no other."""
        errors = {}
        for index, row in enumerate(rows):
            ids = row.token_ids
            if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
                errors[index] = f"a token id is outside the vocabulary of {self._vocab_size}"
            elif row.drafts or row.grammar_row is not None:
                errors[index] = "this runner has neither drafts nor grammars"
        return errors

    def _score_prompts(self, launched: _Launched, indices: list[int], batch: StepBatch, hidden: Tensor) -> None:
        for index, end in zip(indices, batch.row_ends.tolist(), strict=True):
            row = launched.plan.rows[index]
            wanted = self._slots.wanted_prompt_logprobs(row)
            if wanted is None or row.token_ids is None:
                continue
            targets = row.token_ids[1:] + (() if row.next_id is None else (row.next_id,))
            start = end - row.count
            entries: list[TokenLogprobs] = []
            for low in range(0, len(targets), PROMPT_LOGPROB_ROWS):
                some = targets[low : low + PROMPT_LOGPROB_ROWS]
                logits = self._model.compute_logits(hidden[start + low : start + low + len(some)])
                entries += self._sampler.prompt_logprobs(logits, some, wanted)
            launched.prompt_logprobs[index] = tuple(entries)

    def _sample(self, launched: _Launched, indices: list[int], batch: StepBatch, hidden: Tensor) -> None:
        rows = launched.plan.rows
        picked = [(at, index) for at, index in enumerate(indices) if rows[index].sample]
        if not picked:
            return
        launched.sampled_rows = [index for _, index in picked]
        sampling = [rows[index] for index in launched.sampled_rows]
        if len(picked) < hidden.shape[0]:
            last = batch.row_ends[[at for at, _ in picked]] - 1
            hidden = hidden[torch.from_numpy(last).to(self._device, non_blocking=True)]
        logits = self._model.compute_logits(hidden)
        slots = [row.slot for row in sampling]
        launched.sampled = self._sampler.sample(logits, slots, [row.start + row.count for row in sampling])
        to = torch.tensor(slots, dtype=torch.int64).to(self._device, non_blocking=True)
        self._slots.last_tokens[to] = launched.sampled.token_ids

    def _mark_end(self, launched: _Launched) -> None:
        if self._fetch_stream is None:
            launched.compute_s = time.perf_counter() - launched.started_s
        else:
            launched.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            launched.done.record()

    def _is_done(self, launched: _Launched) -> bool:
        return launched.done is None or bool(launched.done.query())  # type: ignore[no-untyped-call]

    def _finish(self, launched: _Launched) -> StepResult:
        ids, logprobs, errors = self._fetch(launched)
        rows = []
        at = {index: place for place, index in enumerate(launched.sampled_rows)}
        for index, row in enumerate(launched.plan.rows):
            error, place = launched.errors.get(index), at.get(index)
            if error is None and place is not None:
                error = errors[place]
            if error is not None:
                rows.append(RowResult(row.slot, error=error))
                continue
            logprob = None if place is None else logprobs[place]
            rows.append(
                RowResult(
                    row.slot,
                    token_ids=() if place is None else (ids[place],),
                    logprobs=None if logprob is None else (logprob,),
                    prompt_logprobs=launched.prompt_logprobs.get(index),
                )
            )
        compute_s = launched.compute_s
        if compute_s is None:
            compute_s = time.perf_counter() - launched.started_s
        return StepResult(launched.plan.step, tuple(rows), compute_s)

    def _fetch(self, launched: _Launched) -> tuple[list[int], list[TokenLogprobs | None], list[str | None]]:
        """Wait for the step and return what its sampling rows drew."""
        if launched.sampled is None:
            if launched.done is not None:
                launched.done.synchronize()
            return [], [], []
        if self._fetch_stream is None or launched.done is None:
            return launched.sampled.host()
        with torch.cuda.stream(self._fetch_stream):
            self._fetch_stream.wait_event(launched.done)
            return launched.sampled.host()
