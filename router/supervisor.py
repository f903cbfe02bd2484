"""Sees one request through: chooses a target, follows the stream, and goes on elsewhere when an engine is lost.

An `Engine` itself, in front of a pool. Tokens that were emitted stay valid: the next attempt resumes behind them with
the same seed, so the client's stream has neither a gap nor a duplicate.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol, cast

from engine.errors import DeadlineError, EngineDiedError, HeadraceError, PressureError, RequestError
from engine.protocol import Engine, EngineInfo, EngineLoad, GenerateRequest, Lease, Outcome, Pool, TokenOutput
from router.attempts import Limits, Run, RunEnded, outcome_of
from router.fleet import describe_any, drain_all, fetch_from_any, total_load
from router.hedging import HedgedLease
from router.readiness import WatchedTarget
from router.retry_budget import RetryBudget


class ListedPool(Pool, Protocol):
    """A pool whose targets can be asked one by one."""

    @property
    def targets(self) -> Sequence[WatchedTarget]: ...


class Supervisor:
    """`counters` are cumulative: "attempts", and by what an attempt failed with and another followed: "resumed" after
    the first output, "retried" before it, "pressed" when the target had no room. `hedge_after_s` asks a second target
    when the first one has not answered for so long; None never does."""

    def __init__(self, pool: ListedPool, *, limits: Limits | None = None, hedge_after_s: float | None = None) -> None:
        self.counters: Counter[str] = Counter()
        self.retry_budget = RetryBudget()
        self._pool = pool
        self._limits = limits or Limits()
        self._hedge_after_s = hedge_after_s
        self._runs: dict[str, Run] = {}
        self._suspects = asyncio.Lock()

    @property
    def num_running(self) -> int:
        return len(self._runs)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        run = self._begin(request)
        alarm = _set_alarm(run)
        try:
            while True:
                lease = await self._choose(run)
                outcome: Outcome = "cancelled"
                try:
                    async with aclosing(self._attempt(run, lease)) as stream:
                        is_first = True
                        while True:
                            output = run.accept(await run.wait(stream.__anext__))
                            if output is None:
                                continue
                            if is_first:
                                is_first = False
                                lease.first_output(output)
                            if output.finish_reason is not None:
                                outcome, run.engine = "ok", None
                            yield output
                            if output.finish_reason is not None:
                                return
                except GeneratorExit:
                    if run.ended_by == "finish":  # its consumer has all that it wanted
                        outcome = "ok"
                    raise
                except StopAsyncIteration:
                    outcome = "fault"
                    self._follow_up(run, EngineDiedError("The engine left the stream without an end."), lease)
                except HeadraceError as error:
                    outcome = outcome_of(error)
                    self._follow_up(run, error, lease)
                finally:
                    run.engine = None
                    run.step_back()
                    lease.release(outcome)
        except RunEnded:
            if run.ended_by == "deadline":
                raise DeadlineError("The request's deadline passed before it finished.") from None
            yield run.end_output()
        finally:
            del self._runs[request.request_id]
            run.step_back()
            if alarm is not None:
                alarm.cancel()

    async def finish(self, request_id: str, keep_tokens: int) -> None:
        if run := self._runs.get(request_id):
            # Also noted, so that an engine which dies before it answers is not replaced.
            run.ended_by = run.ended_by or "finish"
            if run.engine is None:
                run.interrupt("finish")
            else:
                await run.engine.finish(request_id, keep_tokens)

    async def abort(self, request_id: str) -> None:
        if run := self._runs.get(request_id):
            run.ended_by = run.ended_by or "abort"
            if run.engine is None:
                run.interrupt("abort")
            else:
                await run.engine.abort(request_id)

    async def describe(self) -> EngineInfo:
        return await describe_any(self._engines)

    async def fetch_asset(self, digest: str) -> bytes:
        return await fetch_from_any(self._engines, digest)

    async def load(self) -> EngineLoad:
        return await total_load(self._engines)

    async def drain(self) -> None:
        await drain_all(self._engines)

    @property
    def _engines(self) -> list[Engine]:
        return [target.engine for target in self._pool.targets]

    def _begin(self, request: GenerateRequest) -> Run:
        if request.request_id in self._runs:
            raise RequestError(f"Request {request.request_id} is running already.", param="request_id")
        self.retry_budget.deposit()
        run = self._runs[request.request_id] = Run(request, self._limits, self._suspects)
        return run

    async def _choose(self, run: Run) -> Lease:
        """Lease a target that has neither failed nor refused this request; when none is left, one that has failed."""
        await run.step_forward()
        while True:
            try:
                return self._hedge(run, await run.wait(lambda: self._pool.choose(run.so_far, run.full | run.faulty)))
            except PressureError as error:
                if run.faulty:
                    run.faulty.clear()
                    continue
                pause_s = run.pause_for_room(error)
            await run.wait(partial(asyncio.sleep, pause_s))

    def _hedge(self, run: Run, lease: Lease) -> Lease:
        if self._hedge_after_s is None or run.has_started:
            return lease
        others = run.full | run.faulty | {lease.target.target_id}
        return HedgedLease(lease, lambda: self._pool.choose(run.request, others), self._hedge_after_s)

    def _attempt(self, run: Run, lease: Lease) -> _ClosableStream:
        self.counters["attempts"] += 1
        run.engine = lease.target.engine
        return cast(_ClosableStream, run.engine.generate(run.next_attempt()))

    def _follow_up(self, run: Run, error: HeadraceError, lease: Lease) -> None:
        """Note a failed attempt; raises when no other follows."""
        name = lease.target.target_id
        is_gone = not any(one.engine.is_ready for one in self._pool.targets if one.target_id == name)
        run.survive(error, name, is_gone=is_gone)
        if isinstance(error, PressureError):
            self.counters["pressed"] += 1
        elif run.has_started:
            self.counters["resumed"] += 1
        elif run.is_moved_by(error) or self.retry_budget.withdraw():
            self.counters["retried"] += 1
        else:
            raise PressureError("Too many requests are being tried again already.") from error


class _ClosableStream(Protocol):
    """What every `Engine.generate` returns in fact: an async generator, which can be closed early."""

    async def __anext__(self) -> TokenOutput: ...

    async def aclose(self) -> None: ...


def _set_alarm(run: Run) -> asyncio.TimerHandle | None:
    if run.request.deadline_unix_s is None:
        return None
    left_s = max(0.0, run.request.deadline_unix_s - time.time())
    return asyncio.get_running_loop().call_later(left_s, run.interrupt, "deadline")
