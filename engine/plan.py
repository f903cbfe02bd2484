"""The step plan and its result: what the scheduler tells a runner, and what comes back.

Both are frozen, ordered data that msgspec can encode: the synchronous loop, the overlapped loop and every rank consume
the same plan. Nothing here knows torch or requests; a slot is a row of the runner's tables.

A runner executes plans strictly in order. Within one plan it first drops `freed_slots`, then sets up `new_slots`, then
computes `rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.errors import RequestFailedError
from engine.protocol import SamplingParams, TokenLogprobs

NULL_BLOCK = 0
"""Block 0 of every group is never owned: padded rows and unwanted writes go there."""


class NewSlot(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a slot. `prompt_len` is its number of prompt tokens: output index = position - prompt_len.

    `end_ids` are the tokens that min_tokens forbids while output index < min_tokens (end and stop tokens).
    `sampling.seed` is set. `prompt_ids` and `output_ids` (the output so far, of a resumed or preempted request) are
    there only for sampling that depends on them.
    """

    slot: int
    prompt_len: int
    sampling: SamplingParams
    end_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()


class Row(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one slot in one step: positions [start, start + count).

    `token_ids` are those tokens, or None for a decode row (count 1) whose token is the slot's last sample and still on
    the device. `new_blocks[group]` are appended to the slot's block tables before computing. KV of positions below
    `write_start` exists already in a published block: it is computed but written to the null block. With `sample`, the
    logits after the last position are sampled; the new token has position start + count. `next_id` is the prompt token
    at that position, set when the row's slot wants prompt logprobs and the prompt goes on behind the row. `grammar_row`
    is the row's place among the step's masks: the sampled token is one that its mask allows.
    """

    slot: int
    start: int
    count: int
    sample: bool
    new_blocks: tuple[tuple[int, ...], ...]
    token_ids: tuple[int, ...] | None = None
    write_start: int = 0
    drafts: tuple[int, ...] = ()
    grammar_row: int | None = None
    next_id: int | None = None


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. Rows are ordered; a slot has at most one row. `num_masks` of them have a grammar row: the step's masks
    come when its forward pass is under way."""

    step: int
    rows: tuple[Row, ...]
    new_slots: tuple[NewSlot, ...] = ()
    freed_slots: tuple[int, ...] = ()
    num_masks: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


class RowResult(msgspec.Struct, frozen=True, array_like=True):
    """What a row produced: the accepted tokens (one without drafts, none for a row that does not sample).

    `prompt_logprobs` are of the tokens at positions start + 1 .. start + count of a prompt that asked for them; without
    the row's `next_id` the last of these is not there.
    `error` ends this request and no other; `error_code` is that of an error class, RequestError's where the request
    itself is at fault.
    """

    slot: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    error_code: str = RequestFailedError.code


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """Results in the order of the plan's rows. `compute_s` is the step's time in the runner."""

    step: int
    rows: tuple[RowResult, ...]
    compute_s: float = 0.0


class Runner(Protocol):
    """Executes plans. Results come back in step order, at once or several steps late."""

    @property
    def max_in_flight(self) -> int:
        """How many plans may be launched and not collected: 1 is the synchronous loop, 2 overlaps one step."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """Start a step. One that has masks ends before its choices, and waits for `choose` before anything else is
        launched; it is not collected until then."""
        ...

    def choose(self, masks: bytes) -> None:
        """Let the step launched last choose its tokens. The masks of its plan are one behind the other, a bit per token
        each, lowest first, in whole little-endian 32-bit words (engine/grammar/base.py)."""
        ...

    def collect(self, *, block: bool) -> Sequence[StepResult]:
        """Return the results that are ready; with `block`, wait for at least one. Empty when nothing is in flight."""
        ...

    def close(self) -> None: ...
