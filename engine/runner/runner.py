"""Executes step plans on one device: slots, one forward pass, sampling, results in step order.

This file is the hot path. `launch` reads as the list of what happens in a step, in the order in which it must happen,
and nothing in it waits for the device or loops over tokens. What a step means is written in engine/plan.py; policy
(who runs, who waits) does not belong here, and neither does anything about one architecture or back end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.models.base import Model
from engine.plan import Row, RowResult, StepPlan, StepResult
from engine.protocol import TokenLogprobs
from engine.runner.kv_cache import KVCache
from engine.runner.slots import SlotTables
from engine.runner.staging import ReturnedTokens, Staging, TokenReturns
from engine.runner.step_batch import PackedRows, StepBatch, build_step_batch, pack_rows
from engine.sampler.masks import RowMasks
from engine.sampler.sampler import NOT_FINITE, Sampled, Sampler

if TYPE_CHECKING:
    from engine.runner.decode_graphs import DecodeGraphs
    from engine.runner.prompt_graphs import PromptGraphs

PROMPT_LOGPROB_ROWS = 128
"""Logits of so many prompt positions exist at once: a row is as wide as the vocabulary."""

WARM_UP_TOKENS = 64
"""Enough for the kernels of long rows."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """What the sampler is to choose from: one row of logits per slot, for the new tokens at `positions`."""

    logits: Tensor
    slots: list[int]
    positions: list[int]


@dataclass(slots=True)
class _Launched:
    """A step whose results have not been collected. `sampled_rows` are plan rows, in the order of `tokens`, which are
    -1 where a row had none to choose. `sampled` is None when a graph alone has made the choice. `choice` is there while
    the masks are not."""

    plan: StepPlan
    started_s: float
    errors: dict[int, str]
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    sampled_rows: Sequence[int] = ()
    tokens: ReturnedTokens | None = None
    sampled: Sampled | None = None
    choice: _Choice | None = None
    done: torch.cuda.Event | None = None
    compute_s: float | None = None


class TorchRunner:
    """`engine.plan.Runner` on a CPU or one CUDA device. On a CPU `launch` computes; results wait to be collected.

    With `graphs` decode steps, those with few prompt tokens, and full ones (of `max_step_tokens`) run as CUDA graphs;
    the model's back end has to be a fused one, and `warm_up` be called.
    """

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
        max_step_tokens: int = 0,
        graphs: bool = False,
        one_launch: bool | None = None,
    ) -> None:
        groups = len(model.kv_groups())
        max_blocks = -(-max_model_len // block_size)
        self._model, self._cache = model, cache
        self._staging = Staging(device)
        self._returns = TokenReturns(max_slots, device)
        self._slots = SlotTables(max_slots, max_blocks, block_size, groups, device)
        self._sampler = Sampler(max_slots, vocab_size, device, send=self._staging.to_device, one_launch=one_launch)
        self._block_size, self._vocab_size, self._device = block_size, vocab_size, device
        self._max_in_flight, self._max_model_len = max_in_flight, max_model_len
        self._launched: deque[_Launched] = deque()
        # Results are fetched on a stream of their own: on the main one they would queue behind the next step.
        self._fetch_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._fetch_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._decode_graphs: DecodeGraphs | None = None
        self._prompt_graphs: PromptGraphs | None = None
        if graphs:
            from engine.runner.decode_graphs import DecodeGraphs
            from engine.runner.prompt_graphs import PromptGraphs

            self._decode_graphs = DecodeGraphs(
                model,
                cache.layers,
                self._slots,
                self._sampler,
                self._staging,
                max_slots=max_slots,
                max_blocks=max_blocks,
                block_size=block_size,
                vocab_size=vocab_size,
                device=device,
            )
            self._prompt_graphs = PromptGraphs(
                model,
                cache.layers,
                self._slots,
                self._sampler,
                self._staging,
                max_slots=max_slots,
                max_blocks=max_blocks,
                max_step_tokens=max_step_tokens,
                block_size=block_size,
                vocab_size=vocab_size,
                device=device,
            )

    @property
    def cache(self) -> KVCache:
        return self._cache

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    def warm_up(self, on_progress: Callable[[float, str], None]) -> None:
        """Do what the first steps would wait for: compile kernels and capture graphs. Nothing on a CPU."""
        if self._decode_graphs is None or self._prompt_graphs is None or self._device.type != "cuda":
            return
        on_progress(0.0, "compiling kernels")
        self._warm_up_prefill()
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.inference_mode():
            self._prompt_graphs.capture(pool, stream, on_progress)
            self._decode_graphs.capture(pool, stream, on_progress)
        torch.cuda.current_stream(self._device).wait_stream(stream)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Launch what `warm_up` launches, once and without graphs; nothing that a value could mislead."""
        assert self._decode_graphs is not None
        assert self._prompt_graphs is not None
        self._warm_up_logits()
        self._prompt_graphs.rehearse()
        self._decode_graphs.rehearse()

    @torch.inference_mode()
    def _warm_up_prefill(self) -> None:
        self._sampler.sample(self._warm_up_logits(), [0], [min(WARM_UP_TOKENS, self._max_model_len)])

    def _warm_up_logits(self) -> Tensor:
        """Run a prompt that nobody has: the slot is free, so its KV goes to the null block."""
        tokens = min(WARM_UP_TOKENS, self._max_model_len)
        packed = pack_rows([Row(0, 0, tokens, True, (), (0,) * tokens)], self._slots, self._block_size)
        batch = build_step_batch(packed, self._slots, self._block_size, self._staging)
        hidden = self._model(batch.token_ids, batch.groups, self._cache.layers)
        return self._model.compute_logits(hidden[-1:])

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        assert not self._launched or self._launched[-1].choice is None, "the step before has not made its choices"
        started_s = time.perf_counter()
        for slot in plan.freed_slots:
            self._slots.free(slot)
        for new_slot in plan.new_slots:
            self._slots.take(new_slot)
            self._sampler.set_slot(new_slot)
        for row in plan.rows:
            if any(row.new_blocks):
                for group, blocks in self._slots.append_blocks(row):
                    self._cache.clear(group, blocks)
        launched = _Launched(plan, started_s, self._refused(plan.rows))
        if not self._replay_decode(launched):
            self._compute(launched)
        if launched.choice is None:
            self._mark_end(launched)
        self._launched.append(launched)

    @torch.inference_mode()
    def choose(self, masks: bytes) -> None:
        launched = self._launched[-1]
        choice, launched.choice = launched.choice, None
        if choice is not None:  # else every row that samples was refused
            self._sample(launched, choice, self._row_masks(launched, masks))
            self._mark_end(launched)

    def _replay_decode(self, launched: _Launched) -> bool:
        """Run a step of decode rows as a graph; return False, with nothing done, when there is none for it."""
        if self._decode_graphs is None or launched.errors:
            return False
        decode = self._decode_graphs.match(launched.plan.rows)
        done = None if decode is None else self._decode_graphs.launch(decode)
        if decode is None or done is None:
            return False
        tokens, logits = done
        launched.sampled_rows = range(len(launched.plan.rows))
        new_positions = decode.positions + 1
        if not launched.plan.num_masks and self._sampler.kernel_suffices(decode.slots, new_positions):
            launched.tokens = self._returns.start(tokens)
        else:  # The graph's choice gives way to the one with filters, forbidden tokens, masks or logprobs.
            self._choose(launched, _Choice(logits, decode.slots.tolist(), new_positions.tolist()))
        return True

    def _replay_prompts(self, launched: _Launched, packed: PackedRows) -> bool:
        """Run a step with few prompt tokens as a graph; return False, with nothing done, when there is none for it."""
        rows = launched.plan.rows
        if self._prompt_graphs is None or any(self._slots.wanted_prompt_logprobs(row) is not None for row in rows):
            return False
        done = self._prompt_graphs.launch(packed, rows)
        if done is None:
            return False
        tokens, logits = done
        launched.sampled_rows = [index for index, row in enumerate(rows) if row.sample]
        if not launched.sampled_rows:
            return True
        slots = [rows[index].slot for index in launched.sampled_rows]
        new_positions = packed.kv_lens[launched.sampled_rows].astype(np.int64)
        suffices = not launched.plan.num_masks
        suffices = suffices and self._sampler.kernel_suffices(np.array(slots, np.int64), new_positions)
        if len(slots) < len(rows):
            (sampled,) = self._staging.to_device(np.array(launched.sampled_rows, np.int64))
            tokens, logits = tokens[sampled], logits if suffices else logits[sampled]
        if suffices:
            launched.tokens = self._returns.start(tokens)
        else:
            self._choose(launched, _Choice(logits, slots, new_positions.tolist()))
        return True

    def _compute(self, launched: _Launched) -> None:
        """Run any step, operator by operator unless there is a graph for it."""
        plan = launched.plan
        indices = [index for index in range(len(plan.rows)) if index not in launched.errors]
        if indices:
            rows = [plan.rows[index] for index in indices]
            packed = pack_rows(rows, self._slots, self._block_size)
            if not launched.errors and self._replay_prompts(launched, packed):
                return
            batch = build_step_batch(packed, self._slots, self._block_size, self._staging)
            hidden = self._model(batch.token_ids, batch.groups, self._cache.layers)
            if batch.writes_null:
                self._cache.clear_null_block()
            self._score_prompts(launched, indices, batch, hidden)
            self._choose_last(launched, indices, batch, hidden)

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
            elif row.drafts:
                errors[index] = "this runner has no drafts"
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

    def _choose_last(self, launched: _Launched, indices: list[int], batch: StepBatch, hidden: Tensor) -> None:
        rows = launched.plan.rows
        picked = [(at, index) for at, index in enumerate(indices) if rows[index].sample]
        if not picked:
            return
        launched.sampled_rows = [index for _, index in picked]
        sampling = [rows[index] for index in launched.sampled_rows]
        if len(picked) < hidden.shape[0]:
            (last,) = self._staging.to_device(batch.row_ends[[at for at, _ in picked]] - 1)
            hidden = hidden[last]
        logits = self._model.compute_logits(hidden)
        slots, positions = [row.slot for row in sampling], [row.start + row.count for row in sampling]
        self._choose(launched, _Choice(logits, slots, positions))

    def _choose(self, launched: _Launched, choice: _Choice) -> None:
        if launched.plan.num_masks:
            launched.choice = choice
        else:
            self._sample(launched, choice)

    def _sample(self, launched: _Launched, choice: _Choice, masks: RowMasks | None = None) -> None:
        sampled = self._sampler.sample(choice.logits, choice.slots, choice.positions, masks)
        (to,) = self._staging.to_device(np.array(choice.slots, np.int64))
        self._slots.last_tokens[to] = sampled.token_ids
        launched.tokens = self._returns.start(sampled.kept())
        launched.sampled = sampled

    def _row_masks(self, launched: _Launched, masks: bytes) -> RowMasks:
        """Return the masks of the sampling rows that have one."""
        rows = [launched.plan.rows[index].grammar_row for index in launched.sampled_rows]
        words = np.frombuffer(masks, np.int32).reshape(-1, -(-self._vocab_size // 32))
        of_rows = {place: row for place, row in enumerate(rows) if row is not None}
        return RowMasks(tuple(of_rows), words[list(of_rows.values())])

    def _mark_end(self, launched: _Launched) -> None:
        if self._fetch_stream is None:
            launched.compute_s = time.perf_counter() - launched.started_s
        else:
            launched.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            launched.done.record()

    def _is_done(self, launched: _Launched) -> bool:
        if launched.choice is not None:
            return False
        return launched.done is None or bool(launched.done.query())  # type: ignore[no-untyped-call]

    def _finish(self, launched: _Launched) -> StepResult:
        tokens, values = self._fetch(launched)
        rows = launched.plan.rows
        compute_s = launched.compute_s
        if compute_s is None:
            compute_s = time.perf_counter() - launched.started_s
        if len(tokens) == len(rows) and values is None and not launched.prompt_logprobs:
            results = tuple(
                RowResult(row.slot, (token,)) if token >= 0 else _failed(launched, row.slot, place)
                for place, (row, token) in enumerate(zip(rows, tokens, strict=True))
            )
            return StepResult(launched.plan.step, results, compute_s)
        place_of = {index: place for place, index in enumerate(launched.sampled_rows)}
        general = []
        for index, row in enumerate(rows):
            place = place_of.get(index)
            if (error := launched.errors.get(index)) is not None:
                general.append(RowResult(row.slot, error=error))
                continue
            if place is not None and tokens[place] < 0:
                general.append(_failed(launched, row.slot, place))
                continue
            logprobs = None if place is None or values is None else values[place]
            general.append(
                RowResult(
                    row.slot,
                    token_ids=() if place is None else (tokens[place],),
                    logprobs=None if logprobs is None else (logprobs,),
                    prompt_logprobs=launched.prompt_logprobs.get(index),
                )
            )
        return StepResult(launched.plan.step, tuple(general), compute_s)

    def _fetch(self, launched: _Launched) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        """Wait for the step and return what its sampling rows drew, and their logprobs if any row wanted some."""
        if launched.done is not None:
            launched.done.synchronize()
        if launched.tokens is None:
            return [], None
        tokens = launched.tokens.list()
        self._returns.end(launched.tokens)
        if launched.sampled is None or launched.sampled.logprobs is None:
            return tokens, None
        if self._fetch_stream is None:
            return tokens, launched.sampled.values()
        with torch.cuda.stream(self._fetch_stream):
            return tokens, launched.sampled.values()


def _failed(launched: _Launched, slot: int, place: int) -> RowResult:
    """A row that had no token to choose; `place` is its own among the sampling rows."""
    sampled = launched.sampled
    if sampled is None:
        return RowResult(slot, error=NOT_FINITE)
    return RowResult(slot, error=sampled.error(place), error_code=sampled.error_code(place))
