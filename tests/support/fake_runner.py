"""A runner without a model that notices every wrong block.

Its KV memory keeps, per token, the position and a hash of the whole prefix. A row reads what a real one would read, all
of it, through its block tables: an unwritten, reused or foreign block raises WrongKV. The sampled token is a pure
function of the prefix read, the seed and the position, so outputs must equal `expected_output`, whatever was batched,
chunked, cached, preempted or loaded on the way. Plans run when they are collected, up to `max_late` collects late, so
a block that was given away too early is seen too.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from engine.grammar.base import mask_bytes
from engine.plan import NULL_BLOCK, NewSlot, Row, RowResult, StepPlan, StepResult
from engine.protocol import GenerateRequest, KVGroupSpec, TokenLogprobs
from tests.support.walk_grammars import WalkGrammar

ROOT_HASH = 7
Entry = tuple[int, int, int]
"""Position, hash of the prefix up to it, hash of the prefix before it."""


class WrongKV(AssertionError):
    """A row would have read or written KV that is not its own."""


def prefix_hash(before: int, token: int) -> int:
    return hash((before, token))


def sample_token(
    prefix: int,
    seed: int,
    position: int,
    vocab_size: int,
    forbidden: Collection[int] = (),
    allowed: Collection[int] | None = None,
) -> int:
    """`allowed` None allows all. Something must be left."""
    attempt = 0
    while True:
        token = hash((prefix, seed, position, attempt)) % vocab_size
        if token not in forbidden and (allowed is None or token in allowed):
            return token
        attempt += 1


def fake_logprob(prefix: int, token: int) -> TokenLogprobs:
    return TokenLogprobs(-float(hash((prefix, token, 3)) % 1000), [], [])


def expected_output(
    request: GenerateRequest, seed: int, *, vocab_size: int, eos_ids: Sequence[int], window: int
) -> tuple[list[int], str]:
    """Return all output tokens (resumed ones included) of a request that nobody ends early, and how it ends. A grammar
    is one of tests/support/walk_grammars.py."""
    sampling = request.sampling
    ends = end_ids(request, eos_ids)
    walk = None
    if request.grammar is not None:
        walk = WalkGrammar(request.grammar.source, vocab_size).start(request.resume_ids)
    limit = min(len(request.prompt_ids) + (sampling.max_tokens or window), window)
    prefix = ROOT_HASH
    tokens = [*request.prompt_ids, *request.resume_ids]
    for token in tokens:
        prefix = prefix_hash(prefix, token)
    while True:
        index = len(tokens) - len(request.prompt_ids)
        forbidden = ends if index < sampling.min_tokens else ()
        allowed = None if walk is None else walk.allowed()
        token = sample_token(prefix, seed, len(tokens), vocab_size, forbidden, allowed)
        tokens.append(token)
        prefix = prefix_hash(prefix, token)
        if token in ends or (walk is not None and walk.advance(token)):
            return tokens[len(request.prompt_ids) :], "stop"
        if len(tokens) >= limit:
            return tokens[len(request.prompt_ids) :], "length"


def end_ids(request: GenerateRequest, eos_ids: Sequence[int]) -> set[int]:
    """Return the tokens that end a request."""
    return {*(() if request.sampling.ignore_eos else eos_ids), *request.sampling.stop_token_ids}


def expected_prompt_logprobs(prompt_ids: Sequence[int]) -> list[TokenLogprobs | None]:
    prefix = prefix_hash(ROOT_HASH, prompt_ids[0])
    entries: list[TokenLogprobs | None] = [None]
    for token in prompt_ids[1:]:
        entries.append(fake_logprob(prefix, token))
        prefix = prefix_hash(prefix, token)
    return entries


@dataclass
class FakeSlot:
    new: NewSlot
    tables: list[list[int]]
    next_position: int = -1
    sampled: int | None = None
    failed: bool = False


@dataclass
class LaunchedPlan:
    plan: StepPlan
    late: int
    blocks: list[set[int]] = field(default_factory=list)
    masks: bytes | None = None

    @property
    def waits(self) -> bool:
        """For its masks."""
        return self.plan.num_masks > 0 and self.masks is None


class FakeKVMemory:
    """What the device's KV pool would hold."""

    def __init__(self, specs: Sequence[KVGroupSpec], block_size: int) -> None:
        self.block_size = block_size
        self.windows = [spec.window_tokens if spec.kind == "sliding_window" else None for spec in specs]
        self.blocks: list[dict[int, list[Entry | None]]] = [{} for _ in specs]

    def block(self, group: int, block: int) -> list[Entry | None]:
        return self.blocks[group].setdefault(block, [None] * self.block_size)

    def first_read(self, group: int, position: int) -> int:
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)


class FakeRunner:
    """`row_error` is the probability that a row fails. `is_published(group, block)` forbids writes, when given."""

    def __init__(
        self,
        specs: Sequence[KVGroupSpec],
        block_size: int,
        *,
        vocab_size: int = 50,
        max_in_flight: int = 1,
        max_late: int = 0,
        row_error: float = 0.0,
        rng: random.Random | None = None,
    ) -> None:
        self.memory = FakeKVMemory(specs, block_size)
        self.is_published: Callable[[int, int], bool] = lambda group, block: False
        self.in_flight: deque[LaunchedPlan] = deque()
        self.plans: list[StepPlan] | None = None  # set to [] to record
        self.rows_computed = 0
        self.tokens_computed = 0
        self._vocab_size = vocab_size
        self._max_in_flight = max_in_flight
        self._max_late = max_late
        self._row_error = row_error
        self._rng = rng or random.Random(0)
        self._slots: dict[int, FakeSlot] = {}
        self._launch_tables: dict[int, list[list[int]]] = {}
        self._next_step = 0

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    def launch(self, plan: StepPlan) -> None:
        assert len(self.in_flight) < self._max_in_flight, "too many steps in flight"
        assert not any(launched.waits for launched in self.in_flight), "a step has not made its choices"
        assert plan.step == self._next_step, "steps are numbered without gaps"
        assert plan.rows, "a step without rows"
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "a slot has two rows"
        self._next_step += 1
        if self.plans is not None:
            self.plans.append(plan)
        self.in_flight.append(LaunchedPlan(plan, self._rng.randint(0, self._max_late), self._touched(plan)))

    def choose(self, masks: bytes) -> None:
        launched = self.in_flight[-1]
        assert launched.waits, "nobody waits for these masks"
        assert len(masks) == launched.plan.num_masks * mask_bytes(self._vocab_size)
        launched.masks = masks

    def collect(self, *, block: bool) -> list[StepResult]:
        results: list[StepResult] = []
        for launched in self.in_flight:
            launched.late -= 1
        while self.in_flight and (self.in_flight[0].late < 0 or (block and not results)):
            if self.in_flight[0].waits:
                assert results or not block, "a step is waited for that waits for its masks"
                break
            results.append(self._execute(self.in_flight.popleft()))
        return results

    def close(self) -> None:
        self._slots.clear()

    def _touched(self, plan: StepPlan) -> list[set[int]]:
        """Return the blocks per group that the plan will read or write."""
        touched: list[set[int]] = [set() for _ in self.memory.windows]
        for slot in plan.freed_slots:
            del self._launch_tables[slot]
        for new in plan.new_slots:
            assert new.slot not in self._launch_tables, "a slot is taken twice"
            self._launch_tables[new.slot] = [[] for _ in self.memory.windows]
        size = self.memory.block_size
        for row in plan.rows:
            for group, table in enumerate(self._launch_tables[row.slot]):
                table.extend(row.new_blocks[group])
                first = self.memory.first_read(group, row.start) // size
                touched[group].update(table[first : -(-(row.start + row.count) // size)])
        return touched

    def _execute(self, launched: LaunchedPlan) -> StepResult:
        plan = launched.plan
        for slot in plan.freed_slots:
            del self._slots[slot]
        for new in plan.new_slots:
            assert new.sampling.seed is not None, "a slot without a seed"
            self._slots[new.slot] = FakeSlot(new, [[] for _ in self.memory.windows])
        self.rows_computed += len(plan.rows)
        self.tokens_computed += plan.num_tokens
        return StepResult(plan.step, tuple(self._compute(row, launched.masks) for row in plan.rows), 0.001)

    def _compute(self, row: Row, masks: bytes | None) -> RowResult:
        slot = self._slots[row.slot]
        for table, blocks in zip(slot.tables, row.new_blocks, strict=True):
            table.extend(blocks)
        tokens = self._tokens_of(slot, row)
        allowed = self._allowed(row, masks)
        if slot.failed or self._rng.random() < self._row_error or allowed == []:
            # Rows of this slot that are in flight already are overshoot: they have no KV to go on from.
            slot.failed = True
            slot.next_position = row.start + row.count
            slot.sampled = 0 if row.sample else None
            return RowResult(row.slot, error="the fake row failed")
        prefix = self._read_prefix(slot, row.start)
        logprobs = []
        wants = slot.new.prompt_logprobs is not None
        for position, token in enumerate(tokens, row.start):
            before, prefix = prefix, prefix_hash(prefix, token)
            if wants and row.start < position < slot.new.prompt_len:
                logprobs.append(fake_logprob(before, token))
            for group, table in enumerate(slot.tables):
                self._write(group, table, (position, prefix, before), keep=position < row.write_start)
        end = row.start + row.count
        slot.next_position = end
        if wants and end < slot.new.prompt_len:
            assert row.next_id is not None, "the last prompt logprob of a chunk needs the next token"
            logprobs.append(fake_logprob(prefix, row.next_id))
        prompt_logprobs = tuple(logprobs) if wants and row.token_ids is not None else None
        if not row.sample:
            return RowResult(row.slot, prompt_logprobs=prompt_logprobs)
        index = end - slot.new.prompt_len
        assert index >= 0, "sampled inside the prompt"
        sampling = slot.new.sampling
        assert sampling.max_tokens is None or index < sampling.max_tokens, "sampled beyond max_tokens"
        forbidden = slot.new.end_ids if index < sampling.min_tokens else ()
        slot.sampled = sample_token(prefix, sampling.seed or 0, end, self._vocab_size, forbidden, allowed)
        chosen = None if sampling.logprobs is None else (fake_logprob(prefix, slot.sampled),)
        return RowResult(row.slot, (slot.sampled,), chosen, prompt_logprobs)

    def _allowed(self, row: Row, masks: bytes | None) -> list[int] | None:
        """Return what a row's mask allows; None for a row without one."""
        if row.grammar_row is None:
            return None
        assert masks is not None, "a row's mask is not there"
        assert row.sample, "a row has a mask and no choice"
        size = mask_bytes(self._vocab_size)
        bits = int.from_bytes(masks[row.grammar_row * size : (row.grammar_row + 1) * size], "little")
        return [token for token in range(self._vocab_size) if bits >> token & 1]

    def _tokens_of(self, slot: FakeSlot, row: Row) -> Sequence[int]:
        assert row.count > 0
        if slot.next_position >= 0:
            assert row.start == slot.next_position, "a slot's positions have a gap"
        if slot.sampled is not None:
            assert row.token_ids is None, "the host named a token that is on the device"
            assert row.count == 1
            return (slot.sampled,)
        assert row.token_ids is not None, "a row names no tokens and its slot has sampled none"
        assert len(row.token_ids) == row.count
        return row.token_ids

    def _read_prefix(self, slot: FakeSlot, start: int) -> int:
        """Read all KV that the token at `start` attends to; return the hash of the prefix before it."""
        if start == 0:
            return ROOT_HASH
        size, found = self.memory.block_size, set()
        for group, table in enumerate(slot.tables):
            before = None
            for position in range(self.memory.first_read(group, start), start):
                block = table[position // size]
                entry = self.memory.block(group, block)[position % size] if block != NULL_BLOCK else None
                if entry is None or entry[0] != position or (before is not None and entry[2] != before):
                    raise WrongKV(f"group {group} block {block} position {position}: found {entry}")
                before = entry[1]
            assert before is not None, "nothing is visible: use windows of 2 tokens and more"
            found.add(before)
        if len(found) != 1:
            raise WrongKV(f"groups disagree about the prefix before {start}")
        return found.pop()

    def _write(self, group: int, table: list[int], entry: Entry, *, keep: bool) -> None:
        size = self.memory.block_size
        block = table[entry[0] // size]
        if block == NULL_BLOCK:
            raise WrongKV(f"position {entry[0]} has no block in group {group}")
        cells = self.memory.block(group, block)
        if keep:
            if cells[entry[0] % size] != entry:
                raise WrongKV(f"published block {block} of group {group} does not hold position {entry[0]}")
            return
        if self.is_published(group, block):
            raise WrongKV(f"write into published block {block} of group {group}")
        cells[entry[0] % size] = entry
