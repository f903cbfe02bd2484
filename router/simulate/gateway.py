"""One simulated gateway: the router's own dispatcher, index and admission, with messages that take time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from engine.errors import PressureError
from engine.protocol import CachedTokens, EngineLoad
from router.admission import Admission, AdmissionLimits, Ticket
from router.dispatcher import Dispatcher
from router.dispatches import Dispatch
from router.index import PrefixIndex
from router.member import DispatchLease
from router.policies.registry import make_policy
from router.simulate.virtual_time import VirtualTime
from router.simulate.worker import Job, SimWorker
from router.simulate.workload import SimRequest
from router.values import Query


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """How long messages take, in seconds. `sharing_s` is how long dispatches are collected for the other gateways;
    None: they are not told."""

    network_s: float = 0.001
    report_s: float = 0.002
    events_s: float = 0.01
    sharing_s: float | None = 0.02


class Outcome(msgspec.Struct, kw_only=True):
    """What became of one request. Times are at the gateway; None where it did not come to that."""

    request: SimRequest
    target_id: str | None = None
    cached_tokens: int = 0
    predicted_tokens: int = 0
    first_s: float | None = None
    end_s: float | None = None


class SimPool:
    """One gateway's view of the workers of one role, with a policy."""

    def __init__(
        self,
        policy: str,
        workers: Sequence[SimWorker],
        time: VirtualTime,
        rng: random.Random,
        block_tokens: int,
        index_blocks: int,
        admission_limits: AdmissionLimits | None,
    ) -> None:
        self.workers = {worker.worker_id: worker for worker in workers}
        # Room for all that the caches hold and for what was just sent: evictions here would be another subject.
        self.index = PrefixIndex(index_blocks, time.clock)
        self.dispatcher = Dispatcher(make_policy(policy, time.clock, rng), self.index, time.clock, rng)
        self.admission = Admission(self.dispatcher.backlog, time.clock, admission_limits)
        self._time = time
        self._block_tokens = block_tokens
        for worker in workers:
            self.dispatcher.add_target(worker.worker_id)

    def lease(self, request: SimRequest) -> DispatchLease:
        lease = self.dispatcher.choose(self._query(request))
        assert lease is not None, "simulated workers are always ready"
        return lease

    def uncached_tokens(self, request: SimRequest) -> int:
        return self.dispatcher.uncached_tokens(self._query(request))

    def _query(self, request: SimRequest) -> Query:
        return Query(
            request_id=request.request_id,
            prompt_tokens=request.prompt_tokens,
            keys=request.keys,
            block_size=self._block_tokens,
            output_tokens=request.output_tokens,
            session_id=request.session_id,
        )

    def report(self, worker_id: str, load: EngineLoad) -> None:
        self.dispatcher.report_load(worker_id, load)
        self.admission.pump()


class SimGateway:
    """Takes requests to the prefill pool (or the only one), and from there to the decode pool if there is one."""

    def __init__(
        self, time: VirtualTime, delays: Delays, pool: SimPool, decode: SimPool | None, transfer_rate: float
    ) -> None:
        self.pool = pool
        self.decode = decode
        self.shed = 0
        self._time = time
        self._delays = delays
        self._transfer_rate = transfer_rate

    def arrive(self, outcome: Outcome) -> None:
        """A client's request has come."""

        def end(ticket: Ticket) -> None:
            if ticket.state == "admitted":
                self._dispatch(outcome, ticket)
            else:
                self.shed += 1

        admission = self.pool.admission
        try:
            request = outcome.request
            ticket = admission.offer(request.prompt_tokens, 0, end, lambda: self.pool.uncached_tokens(request))
        except PressureError:
            self.shed += 1
            return
        if ticket.state == "admitted":
            self._dispatch(outcome, ticket)
        else:
            self._time.after(admission.limits.max_wait_s, lambda: self._give_up(ticket))

    def _give_up(self, ticket: Ticket) -> None:
        if ticket.state == "waiting":
            self.pool.admission.leave(ticket)
            self.shed += 1
            self.pool.admission.pump()

    def _dispatch(self, outcome: Outcome, ticket: Ticket) -> None:
        request = outcome.request
        lease = self.pool.lease(request)
        self.pool.admission.settle(ticket)
        outcome.target_id = lease.target_id
        outcome.predicted_tokens = lease.hit.tokens

        def first(cached_tokens: int) -> None:
            outcome.cached_tokens = cached_tokens
            self._later(lambda: self._first_output(self.pool, lease, outcome, cached_tokens))

        def end() -> None:
            self._later(lambda: self._release(self.pool, lease, outcome))

        outputs = 1 if self.decode is not None else request.output_tokens
        job = Job(request, outputs=outputs, on_first=first, on_end=end)
        self._later(lambda: self.pool.workers[lease.target_id].submit(job))

    def _first_output(self, pool: SimPool, lease: DispatchLease, outcome: Outcome, cached_tokens: int) -> None:
        lease.first_output(CachedTokens(device=cached_tokens))
        pool.admission.pump()
        if pool is self.decode or self.decode is None:
            outcome.first_s = self._time.now

    def _release(self, pool: SimPool, lease: DispatchLease, outcome: Outcome) -> None:
        lease.release("ok")
        pool.admission.pump()
        if pool is self.decode or self.decode is None:
            outcome.end_s = self._time.now
        else:
            self._hand_over(self.decode, outcome)

    def _hand_over(self, decode: SimPool, outcome: Outcome) -> None:
        """Send a computed prompt to a decode worker: its KV travels first, then the last token is computed there."""
        request = outcome.request
        lease = decode.lease(request)
        job = Job(
            request,
            outputs=request.output_tokens,
            on_first=lambda cached: self._later(lambda: self._first_output(decode, lease, outcome, cached)),
            on_end=lambda: self._later(lambda: self._release(decode, lease, outcome)),
            is_received=True,
        )
        transfer_s = self._delays.network_s + request.prompt_tokens / self._transfer_rate
        self._time.after(transfer_s, lambda: decode.workers[lease.target_id].submit(job))

    def _later(self, event: Callable[[], None]) -> None:
        self._time.after(self._delays.network_s, event)


class SharedDispatches:
    """Tells the other gateways of one gateway's leases, collected for a while. A `DispatchObserver`."""

    def __init__(self, name: str, time: VirtualTime, delay_s: float, peers: Sequence[Dispatcher]) -> None:
        self._name = name
        self._time = time
        self._delay_s = delay_s
        self._peers = peers
        self._notes: list[Callable[[Dispatcher], None]] = []

    def dispatched(self, dispatch: Dispatch) -> None:
        self._tell(lambda peer: peer.peer_dispatched(self._name, dispatch))

    def first_output(self, lease_id: int) -> None:
        self._tell(lambda peer: peer.peer_first_output(self._name, lease_id))

    def released(self, lease_id: int) -> None:
        self._tell(lambda peer: peer.peer_released(self._name, lease_id))

    def _tell(self, note: Callable[[Dispatcher], None]) -> None:
        if not self._notes:
            self._time.after(self._delay_s, self._flush)
        self._notes.append(note)

    def _flush(self) -> None:
        notes, self._notes = self._notes, []
        for peer in self._peers:
            for note in notes:
                note(peer)
