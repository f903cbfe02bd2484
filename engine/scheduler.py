"""Which tokens the next step computes: queues, admission, preemption. Knows no torch, no text and no outputs.

The order of a step is the policy:

1. running requests, by (priority, arrival): each gets the next of its tokens, a chunk at most as large as the budget
   left after one token for everybody behind it. One that finds no free block preempts the last of them.
2. waiting requests in the same order, while there is a slot, budget, and room above the watermark. The first that does
   not fit ends the search: nobody overtakes it, or large requests would starve.

Progress: the first running request can always grow. Everyone behind it can be preempted, what is in flight or with the
KVPort comes back by itself, and what does not fit alone was refused at the door. So nobody ever preempts itself.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Literal

from engine.kv.event_log import KVEventLog
from engine.kv.groups import KVGroups
from engine.kv.port import Load, PortBlocks
from engine.kv.prefix import PrefixHit
from engine.ledger import InFlightLedger, LaunchedStep
from engine.plan import NewSlot, Row, StepPlan
from engine.protocol import KVPort, LoadPlan
from engine.request import Request, RequestState

_by_order = attrgetter("order")


class RequestQueue:
    """Requests by (priority, arrival); smaller goes first. A preempted request comes back to its old place."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        """In order. Others read it: the step's hot loop goes over it by index."""

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def add(self, request: Request) -> None:
        insort(self.requests, request, key=_by_order)

    def remove(self, request: Request) -> None:
        index = bisect_left(self.requests, request.order, key=_by_order)
        assert self.requests[index] is request, f"request {request.request_id} is not in the queue"
        del self.requests[index]


class StepDraft:
    """A step in the making. Only what has a row here is marked as computed, and only by `add_row`."""

    __slots__ = ("budget", "new_slots", "num_masks", "requests", "rows", "step")

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        self.rows: list[Row] = []
        self.requests: list[Request] = []
        self.new_slots: list[NewSlot] = []
        self.num_masks = 0

    def add_row(self, request: Request, count: int, no_new_blocks: tuple[tuple[int, ...], ...]) -> None:
        """Give the request its next `count` tokens. Its tables cover them."""
        start = request.num_computed
        end = start + count
        sample = end == len(request.tokens) + request.pending and not request.prefill_only
        token_ids = None if request.on_device else tuple(request.tokens[start:end])
        new_blocks = no_new_blocks
        if request.capacity > request.sent_capacity:
            sent = request.sent_capacity // request.block_size
            new_blocks = tuple(tuple(table[sent:]) for table in request.tables)
            request.sent_capacity = request.capacity
        if not request.announced:
            self.new_slots.append(_new_slot(request))
            request.announced = True
        write_start = request.write_start if request.write_start > start else 0
        next_id = None
        if end < request.prompt_len and request.prompt_logprobs_missing:
            next_id = request.tokens[end]
        grammar_row = None
        if request.matcher is not None and sample:
            grammar_row = self.num_masks
            self.num_masks += 1
        self.rows.append(
            Row(request.slot, start, count, sample, new_blocks, token_ids, write_start, (), grammar_row, next_id)
        )
        self.requests.append(request)
        self.budget -= count
        request.num_computed = end
        request.last_step = self.step
        if sample:
            # From here on the slot's next token is the one it sampled last, known to the host or not.
            request.pending += 1
            request.on_device = True


def _new_slot(request: Request) -> NewSlot:
    wanted = request.spec.prompt_logprobs if request.prompt_logprobs_missing else None
    sampling, prompt_len = request.spec.sampling, request.prompt_len
    prompt_ids = tuple(request.tokens[:prompt_len]) if sampling.depends_on_prompt else ()
    # All of the output is known here: a request that waits has no tokens in flight.
    output_ids = tuple(request.tokens[prompt_len:]) if sampling.depends_on_outputs else ()
    return NewSlot(request.slot, prompt_len, sampling, request.end_ids, wanted, prompt_ids, output_ids)


class Scheduler:
    """Owner of queues, slots and the blocks of live requests."""

    def __init__(
        self,
        kv: KVGroups,
        *,
        max_running: int,
        max_step_tokens: int,
        prefix_cache: bool = True,
        port: KVPort | None = None,
        event_log: KVEventLog | None = None,
    ) -> None:
        self.kv = kv
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.ledger = InFlightLedger()
        self.port = PortBlocks(kv, port)
        self._event_log = event_log
        self.preemptions = 0
        self.next_step = 0
        self._queued_tokens = 0
        self._max_step_tokens = max_step_tokens
        self._prefix_cache = prefix_cache
        self._free_slots = list(range(max_running - 1, -1, -1))
        self._freed_slots: list[int] = []
        self._leaders: dict[str, Request] = {}

    @property
    def queued_tokens(self) -> int:
        """What the waiting requests have to compute, less what was cached when each of them came into the queue."""
        return self._queued_tokens

    def add(self, request: Request) -> None:
        hit = self.kv.match(self._usable_keys(request), request.num_tokens)
        request.queued_tokens = request.num_tokens - self.kv.first_position(hit.num_blocks, request.num_tokens)
        self._queued_tokens += request.queued_tokens
        self.port.look_up(request, self._usable_keys(request), hit.num_blocks)
        self.waiting.add(request)

    def _remove_waiting(self, request: Request) -> None:
        self.waiting.remove(request)
        self._queued_tokens -= request.queued_tokens

    def schedule(self, now_s: float) -> StepPlan | None:
        """Return the next step, entered into the ledger, or None when nobody can go on."""
        draft = StepDraft(self.next_step, self._max_step_tokens)
        preemptions = self.preemptions
        self._schedule_running(draft)
        if self.preemptions == preemptions:
            self._schedule_waiting(draft, now_s)
        if not draft.rows:
            return None
        freed_slots = tuple(self._freed_slots)
        plan = StepPlan(draft.step, tuple(draft.rows), tuple(draft.new_slots), freed_slots, draft.num_masks)
        self._freed_slots.clear()
        self.next_step += 1
        self.ledger.open(plan, draft.requests)
        return plan

    def _schedule_running(self, draft: StepDraft) -> None:
        running, no_new_blocks = self.running.requests, self.kv.no_new_blocks
        index = 0
        while index < len(running) and draft.budget > 0:  # len shrinks by preemption
            request = running[index]
            index += 1
            num_tokens = len(request.tokens) + request.pending
            if num_tokens >= request.max_total_tokens:
                continue  # its last token is being sampled
            count = num_tokens - request.num_computed
            if count == 0:
                continue  # it samples nothing, and the last of its prompt is being computed
            if count > 1:
                count = min(count, max(1, draft.budget - (len(running) - index)))
            if request.num_computed + count > request.capacity:
                count = self._reserve(request, count)
                if count == 0:
                    continue
            draft.add_row(request, count, no_new_blocks)

    def _reserve(self, request: Request, wanted: int) -> int:
        """Find blocks for the next `wanted` tokens, or for fewer; return how many tokens can go on."""
        size, start = self.kv.block_size, request.num_computed
        while True:
            blocks = min(-(-(start + wanted) // size), len(request.tables[0]) + self.kv.room())
            count = min(wanted, blocks * size - start)
            if count > 0 and self.kv.extend(request.tables, blocks):
                request.capacity = blocks * size
                return count
            victim = self.running.requests[-1]
            # While blocks are on their way back, preempting more would cost work for nothing.
            if victim is request or self.ledger.awaits_release:
                return 0
            self.preempt(victim)

    def _schedule_waiting(self, draft: StepDraft, now_s: float) -> None:
        index = 0
        while index < len(self.waiting) and draft.budget > 0 and self._free_slots:
            request = self.waiting.requests[index]
            if self._follows_leader(request):
                index += 1
                continue
            admitted = self._admit(request, draft)
            if admitted == "later":
                index += 1
                continue
            if not admitted:
                return
            if request.started_s is None:
                request.started_s = now_s

    def _follows_leader(self, request: Request) -> bool:
        """The choices of one n > 1 request share a prefill: later ones wait until the first has published it."""
        group = request.spec.group_id
        if group is None or not self._prefix_cache or request.prompt_logprobs_missing:
            return False
        leader = self._leaders.get(group)
        if leader is None or leader.state not in (RequestState.RUNNING, RequestState.WAITING_KV):
            return False
        shared = leader.prompt_len // self.kv.block_size
        if not leader.publishes or leader.published_blocks >= shared:
            return False
        # One key for all of the blocks, and for the scope: asked of every follower in every step of a long prefill.
        keys = request.chain.extend(request.tokens)
        return len(keys) >= shared and keys[shared - 1] == leader.chain.keys[shared - 1]

    def _admit(self, request: Request, draft: StepDraft) -> bool | Literal["later"]:
        """Give a waiting request a slot, blocks and a row; or start its load. Return False when there is no room, and
        "later" for one of which the port does not know yet what it can load."""
        keys = self._usable_keys(request)
        hit = self.kv.match(keys, request.num_tokens)
        start = self.kv.first_position(hit.num_blocks, request.num_tokens)
        count = min(request.num_tokens - start, draft.budget)
        fresh = max(0, -(-(start + count) // self.kv.block_size) - hit.num_blocks)
        room = self.kv.room(hit, above_watermark=len(self.running) > 0)
        if fresh > room:
            if len(self.running) > 0 or room <= 0:
                return False
            fresh = room  # alone, with little room: a smaller step is better than none
            count = (hit.num_blocks + room) * self.kv.block_size - start
        plan = self.port.match(request, keys, hit.num_blocks)
        if plan == "later":
            return "later"
        self._take_slot(request)
        if plan is not None and self._start_load(request, hit, plan):
            return True
        request.tables = self.kv.adopt(hit, hit.num_blocks + fresh)
        request.capacity = len(request.tables[0]) * self.kv.block_size
        request.start_behind(hit.num_blocks, start)
        request.count_cached(start)
        self._start_running(request)
        draft.add_row(request, count, self.kv.no_new_blocks)
        return True

    def _usable_keys(self, request: Request) -> list[bytes]:
        """Return the keys of the blocks that need no computing if they are cached."""
        if not self._prefix_cache:
            return []
        keys = request.chain.extend(request.tokens)
        if request.prompt_logprobs_missing:
            return keys[: request.skippable_tokens // self.kv.block_size]
        return keys

    def _take_slot(self, request: Request) -> None:
        self._remove_waiting(request)
        request.slot = self._free_slots.pop()
        request.publishes = self._prefix_cache
        group = request.spec.group_id
        if group is not None:
            leader = self._leaders.get(group)
            if leader is None or leader.state is RequestState.WAITING:
                self._leaders[group] = request

    def _start_running(self, request: Request) -> None:
        request.state = RequestState.RUNNING
        self.running.add(request)

    def _start_load(self, request: Request, hit: PrefixHit, plan: LoadPlan) -> bool:
        num_blocks = hit.num_blocks + len(plan.keys)
        if len(plan.keys) > self.kv.room(hit, above_watermark=len(self.running) > 0):
            return False
        position = self.kv.first_position(num_blocks, request.num_tokens)
        request.tables = self.kv.adopt(hit, num_blocks, position)
        request.state = RequestState.WAITING_KV
        self.port.start_load(request, plan)
        return True

    def poll_port(self) -> int:
        """Let requests go on whose load has ended; return how many loads ended."""
        ended = 0
        for load in self.port.poll():
            ended += 1
            if load.request.finished:
                self._release(load.request)
            else:
                self._take_loaded(load)
        return ended

    def _take_loaded(self, load: Load) -> None:
        """Publish what was loaded and run on behind it. What failed is recomputed, like any other token."""
        request, kv, begin = load.request, self.kv, load.plan.start_block
        num_blocks = kv.usable_blocks(request.tables, begin + load.blocks, request.num_tokens)
        kv.truncate(request.tables, num_blocks)
        if request.publishes:
            for index in range(begin, num_blocks):
                self._publish(request, index)
        position = kv.first_position(num_blocks, request.num_tokens)
        kv.drop_passed(request.tables, position, all_before=True)
        request.capacity = num_blocks * kv.block_size
        request.start_behind(num_blocks, position)
        device = kv.first_position(min(begin, num_blocks), request.num_tokens)
        request.count_cached(device, position - device, load.plan.tiers)
        self._start_running(request)

    def complete(self, request: Request, end: int) -> None:
        """Positions before `end` of the request are computed: publish the blocks that this filled."""
        request.num_completed = end
        if end < request.next_full:
            return
        full = end // self.kv.block_size
        if request.publishes:
            keys = request.chain.extend(request.tokens)
            for index in range(request.published_blocks, full):
                if self._publish(request, index):
                    self.port.publish(request, index, keys[index])
        request.published_blocks = full
        request.next_full = (full + 1) * self.kv.block_size
        self.kv.drop_passed(request.tables, end)

    def _publish(self, request: Request, index: int) -> bool:
        """Make a full block findable, and known to others; return whether it is new in any group."""
        keys = request.chain.keys
        if not self.kv.publish(request.tables, index, keys[index]):
            return False
        if self._event_log is not None and self._event_log.enabled:
            size = request.block_size
            self._event_log.stored(request.chain.scope, keys, index, request.tokens[index * size : (index + 1) * size])
        return True

    def close_step(self, launched: LaunchedStep) -> None:
        """Take back what only this step still used."""
        self.port.flush()
        for request in self.ledger.take_released():
            assert not self.ledger.uses(request), f"{request.request_id} released during {launched.plan.step}"
            self._release(request)

    def preempt(self, request: Request) -> None:
        """Send a running request back to its place in the queue. It keeps its tokens, also those in flight."""
        self.running.remove(request)
        request.state = RequestState.WAITING
        self.preemptions += 1
        self._give_back(request)

    def retire(self, request: Request) -> None:
        """A request has ended, whatever it was doing."""
        group = request.spec.group_id
        if group is not None and self._leaders.get(group) is request:
            del self._leaders[group]
        state, released_later = request.state, request.preempted_in_flight
        request.state = RequestState.FINISHED
        if state is RequestState.RUNNING:
            self.running.remove(request)
        elif state is RequestState.WAITING and not released_later:
            self._remove_waiting(request)
        # The ledger or the port will report a request that is in use, and the others have nothing to wait for.
        if state is not RequestState.WAITING_KV and not released_later:
            self._give_back(request)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Requests that run now publish no more: their older blocks have no key."""
        self.kv.clear()
        for request in (*self.running, *self.port.loading_requests(), *self.ledger.owners()):
            request.publishes = False

    def _give_back(self, request: Request) -> None:
        if self.ledger.uses(request):
            self.ledger.release_after_flight(request)
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        if request.slot >= 0:
            self._free_slots.append(request.slot)
            if request.announced:
                self._freed_slots.append(request.slot)
        self.port.end(request)
        request.leave_device()
        if not request.finished:
            self.add(request)

    def check_integrity(self, max_running: int) -> None:
        """Raise AssertionError when blocks, slots or queues do not add up."""
        owners = [*self.running, *self.ledger.owners(), *self.port.loading_requests()]
        self.kv.check_integrity([r.tables for r in owners] + self.port.owned_tables())
        slots = [r.slot for r in owners]
        assert all(slot >= 0 for slot in slots), "an owner of blocks has no slot"
        assert sorted(slots + self._free_slots) == list(range(max_running)), "slots do not add up"
        for queue in (self.running, self.waiting):
            orders = [r.order for r in queue]
            assert orders == sorted(orders), "a queue is out of order"
        assert all(r.state is RequestState.RUNNING for r in self.running), "a stranger among the running"
        assert self._queued_tokens == sum(r.queued_tokens for r in self.waiting), "queued tokens do not add up"
        for request in self.waiting:
            assert request.state is RequestState.WAITING, "a stranger among the waiting"
            assert request.slot < 0, "a waiting request has a slot"
            assert not request.tables, "a waiting request has blocks"
            assert not request.pending, "a waiting request has tokens in flight"
        for request in (r for r in owners if not r.finished):
            assert request.num_completed <= request.num_computed <= request.num_tokens, "counts are out of order"
            assert not request.tables or request.num_computed <= len(request.tables[0]) * request.block_size
