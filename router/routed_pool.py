"""The pool that requests are served from: a dispatcher and an admission queue in an event loop.

Routing is the dispatcher's. What is decided here is how long a request waits, for room and for a target that is ready,
and whom it is told when things change.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence

from engine.errors import DeadlineError, LoadingError, PressureError
from engine.protocol import EngineLoad, GenerateRequest, Lease, Outcome, TokenOutput
from router.admission import Admission, AdmissionLimits, ShedReason, Ticket
from router.decision import REMEMBERED_DECISIONS, DecisionLog
from router.dispatcher import Dispatcher
from router.key_memo import KeyMemo
from router.member import DispatchLease
from router.readiness import PATIENCE_S, WatchedTarget, refuse_while_loading, wait_for_any
from router.values import Query, TargetState

REMEMBERED_RETURNS = 10_000
"""Requests whose attempt failed and which are expected to ask for another target."""

UNTAKEN_TIMES = 16_384
"""Of decisions that nobody asked for. Older ones are forgotten."""

CLOCK_SLACK_S = 0.01
"""Timers run on another clock than deadlines and may be early by as much."""


class RoutedLease:
    """One request on one target. Only the first release counts."""

    def __init__(self, pool: RoutedPool, target: WatchedTarget, lease: DispatchLease) -> None:
        self.target = target
        self._pool = pool
        self._lease = lease

    def first_output(self, output: TokenOutput) -> None:
        self._lease.first_output(output.cached)
        self._pool.admission.pump()

    def release(self, outcome: Outcome) -> None:
        self._lease.release(outcome)
        if outcome in ("fault", "pressure"):
            self._pool._expect_again(self._lease.decision.request_id)
        self._pool.admission.pump()


class RoutedPool:
    """`block_size` is that of the targets' block keys; None while it is not known: prompts then match nothing.

    The owner adds and removes targets as it learns of them, and hands on the engines' load reports. `dispatcher` keeps
    what is in flight and how leases ended, `decisions` the last ones for those who ask why.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        block_size: int | None = None,
        admission_limits: AdmissionLimits | None = None,
        patience_s: float = PATIENCE_S,
        num_decisions: int = REMEMBERED_DECISIONS,
    ) -> None:
        self.dispatcher = dispatcher
        self.block_size = block_size
        self.admission = Admission(dispatcher.backlog, dispatcher.clock, admission_limits)
        self.decisions = DecisionLog(num_decisions)
        self._keys = KeyMemo()
        self._decision_times_s: deque[float] = deque(maxlen=UNTAKEN_TIMES)
        self._patience_s = patience_s
        self._targets: dict[str, WatchedTarget] = {}
        self._changed = asyncio.Event()
        self._served_once = False
        self._expected_again: OrderedDict[str, None] = OrderedDict()

    @property
    def targets(self) -> Sequence[WatchedTarget]:
        return tuple(self._targets.values())

    @property
    def in_flight(self) -> dict[str, int]:
        """Claims not yet released, by target; those of peers too."""
        return self.dispatcher.in_flight

    def add(self, target: WatchedTarget, state: TargetState = "ready") -> None:
        """Route to a target. One of the same id is replaced, and what was known of it is void."""
        self._targets[target.target_id] = target
        self.dispatcher.renew_target(target.target_id, state)
        self._note_change()

    def remove(self, target_id: str) -> None:
        """Route to it no more. Its leases stay valid; unknown ids are ignored."""
        self._targets.pop(target_id, None)
        self.dispatcher.remove_target(target_id)
        self._note_change()

    def set_state(self, target_id: str, state: TargetState) -> None:
        """Whoever keeps the list says this again and again: only what is new wakes those that wait."""
        if self.dispatcher.set_state(target_id, state):
            self._note_change()

    def renew(self, target_id: str) -> None:
        """The target's process was replaced by another: its cache, its load and its faults are gone."""
        if target_id in self._targets:
            self.dispatcher.renew_target(target_id)
            self._note_change()

    def report_load(self, target_id: str, load: EngineLoad, *, tells_tokens: bool = True) -> None:
        self.dispatcher.report_load(target_id, load, tells_tokens=tells_tokens)
        self.admission.pump()

    async def choose(self, request: GenerateRequest, exclude: Collection[str]) -> Lease:
        """See `Pool`. Also raises LoadingError while no target has ever been ready.

        A request whose attempt failed does not queue again: it has been admitted, and its client may be reading.
        """
        begun_s = time.perf_counter()
        query = self._query(request)
        query_s = time.perf_counter() - begun_s
        unfit = [target.target_id for target in self._targets.values() if not target.takes(request)]
        if len(unfit) < len(self._targets):  # where none can do what is asked for, one of them says so
            exclude = {*exclude, *unfit}
        return await self.place(
            query, exclude, priority=request.priority, deadline_unix_s=request.deadline_unix_s, query_s=query_s
        )

    async def place(
        self,
        query: Query,
        exclude: Collection[str],
        *,
        priority: int,
        deadline_unix_s: float | None,
        query_s: float = 0.0,
    ) -> Lease:
        """The same for what is known of a request without its tokens. `query_s` is what making the query took."""
        if query.request_id in self._expected_again:
            del self._expected_again[query.request_id]
            return await self._lease(query, deadline_unix_s, exclude, query_s)
        ticket = await self._admit(query, priority, deadline_unix_s)
        try:
            return await self._lease(query, deadline_unix_s, exclude, query_s)
        finally:
            self.admission.settle(ticket)
            self.admission.pump()

    def take_decision_times(self) -> list[float]:
        """Return how long each decision since the last call took, in seconds: hashing the prompt, looking it up and
        choosing; not what was waited for."""
        times_s = list(self._decision_times_s)
        self._decision_times_s.clear()
        return times_s

    async def _lease(
        self, query: Query, deadline_unix_s: float | None, exclude: Collection[str], query_s: float
    ) -> RoutedLease:
        while True:
            changed = self._changed  # taken before the look at the targets, so that no change is missed
            allowed = [target for name, target in self._targets.items() if name not in exclude]
            if not allowed and self._targets:
                raise PressureError("No engine has room.")
            unreachable = {target.target_id for target in allowed if not target.engine.is_ready}
            begun_s = time.perf_counter()
            lease = self.dispatcher.choose(query, exclude, unreachable)
            if lease is not None:
                self._decision_times_s.append(query_s + time.perf_counter() - begun_s)
                self._served_once = True
                self.decisions.add(lease.decision)
                return RoutedLease(self, self._targets[lease.target_id], lease)
            if not self._served_once:
                if not allowed:
                    raise LoadingError("No worker is ready yet.", progress=0.0)
                await refuse_while_loading(allowed)
            waits = [target.engine.wait_ready() for target in allowed if target.target_id in unreachable]
            await wait_for_any([*waits, changed.wait()], deadline_unix_s, self._patience_s)

    async def _admit(self, query: Query, priority: int, deadline_unix_s: float | None) -> Ticket:
        """Return an admitted ticket, at once or when its turn has come."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def end(ticket: Ticket) -> None:
            if not turn.done():
                turn.set_result(None)

        ticket = self.admission.offer(
            query.prompt_tokens, priority, end, lambda: self.dispatcher.uncached_tokens(query)
        )
        if ticket.state == "admitted":
            return ticket
        try:
            await self._wait_turn(turn, deadline_unix_s)
        except TimeoutError:
            if ticket.state == "waiting":  # else its turn came in the same moment
                reason: ShedReason = "deadline" if _is_past(deadline_unix_s) else "queue_timeout"
                self._give_up(ticket, reason)
                refusal = self.admission.refusal(reason)
                raise (DeadlineError(str(refusal)) if reason == "deadline" else refusal) from None
        except BaseException:
            # Its client left, or its deadline interrupted it.
            self._give_up(ticket, "deadline" if _is_past(deadline_unix_s) else None)
            raise
        if ticket.state == "shed":
            raise self.admission.refusal("displaced")
        return ticket

    def _give_up(self, ticket: Ticket, reason: ShedReason | None) -> None:
        self.admission.leave(ticket, reason)
        self.admission.settle(ticket)
        self.admission.pump()

    async def _wait_turn(self, turn: asyncio.Future[None], deadline_unix_s: float | None) -> None:
        """Raises TimeoutError when nobody may wait longer, or this request may not."""
        wait_s = self.admission.limits.max_wait_s
        if deadline_unix_s is not None:
            wait_s = min(wait_s, max(0.0, deadline_unix_s - time.time()))
        await asyncio.wait_for(turn, wait_s)

    def _query(self, request: GenerateRequest) -> Query:
        size = self.block_size
        keys: Sequence[bytes] = () if size is None else self._keys.keys(request, size)
        return Query(
            request_id=request.request_id,
            prompt_tokens=len(request.prompt_ids) + len(request.resume_ids),
            keys=keys,
            block_size=size or 64,
            output_tokens=request.sampling.max_tokens,
            session_id=request.session_id,
        )

    def _expect_again(self, request_id: str) -> None:
        self._expected_again[request_id] = None
        if len(self._expected_again) > REMEMBERED_RETURNS:
            self._expected_again.popitem(last=False)

    def _note_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self.admission.pump()


def _is_past(deadline_unix_s: float | None) -> bool:
    return deadline_unix_s is not None and time.time() >= deadline_unix_s - CLOCK_SLACK_S
