"""Sees one relayed request through: chooses a server, passes its answer on, and asks another one while nothing of an
answer has been passed on. Text cannot be continued elsewhere, so from then on an answer that breaks is broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import msgspec

from engine.errors import EngineDiedError, HeadraceError, PressureError
from engine.protocol import GenerateRequest, Lease, Outcome, TokenOutput
from router.attempts import Limits, Run, outcome_of
from router.routed_pool import RoutedPool
from router.supervisor import Supervisor
from router.values import Query
from server.foreign.exchange import Exchange

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Of an answer that is not streamed."""

EVENT_STREAM = "text/event-stream"


class RelayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`body` is posted to `path` as it is. `prompt_tokens` is an estimate: nobody here splits text."""

    request_id: str
    path: str
    body: bytes
    headers: Mapping[str, str]
    prompt_tokens: int
    priority: int = 0
    session_id: str | None = None
    deadline_unix_s: float | None = None


@dataclass(frozen=True)
class WholeAnswer:
    body: bytes


@dataclass(frozen=True)
class StreamedAnswer:
    """Iterate `chunks` once: bytes of events, cut anywhere."""

    chunks: AsyncIterator[bytes]


RelayedAnswer = WholeAnswer | StreamedAnswer


class RelayingEngine(Protocol):
    """What is asked of the engines of such a pool."""

    def relay(
        self, request_id: str, path: str, body: bytes, headers: Mapping[str, str], deadline_unix_s: float | None
    ) -> AbstractAsyncContextManager[Exchange]: ...


class RelaySupervisor:
    """Counts and spends with `supervisor`, which sees requests with token ids through in other pools."""

    def __init__(self, pool: RoutedPool, supervisor: Supervisor, *, limits: Limits | None = None) -> None:
        self._pool = pool
        self._counters, self._budget = supervisor.counters, supervisor.retry_budget
        self._limits = limits or Limits()
        self._suspects = asyncio.Lock()

    @asynccontextmanager
    async def ask(self, request: RelayRequest) -> AsyncIterator[RelayedAnswer]:
        """Give an answer that has begun, or all of one that is not streamed. Raises what an attempt failed with that no
        other follows, also from the answer's chunks; leaving early ends the request at its server."""
        known = GenerateRequest(request_id=request.request_id, prompt_ids=[], deadline_unix_s=request.deadline_unix_s)
        run = Run(known, self._limits, self._suspects)
        self._budget.deposit()
        try:
            while True:
                lease = await self._choose(run, request)
                outcome: Outcome = "cancelled"
                try:
                    async with AsyncExitStack() as stack:
                        answer = await self._begin(stack, request, lease)
                        run.has_started = True
                        lease.first_output(TokenOutput(request.request_id, 0, 0, []))
                        yield answer
                    outcome = "ok"
                    return
                except HeadraceError as error:
                    outcome = outcome_of(error)
                    if run.has_started:
                        raise
                    self._follow_up(run, error, lease)
                finally:
                    run.step_back()
                    lease.release(outcome)
        finally:
            run.step_back()

    async def _choose(self, run: Run, request: RelayRequest) -> Lease:
        await run.step_forward()
        query = Query(request_id=request.request_id, prompt_tokens=request.prompt_tokens, session_id=request.session_id)
        while True:
            try:
                return await self._pool.place(
                    query,
                    run.full | run.faulty,
                    priority=request.priority,
                    deadline_unix_s=request.deadline_unix_s,
                )
            except PressureError:
                if not run.faulty:
                    raise
                run.faulty.clear()

    async def _begin(self, stack: AsyncExitStack, request: RelayRequest, lease: Lease) -> RelayedAnswer:
        self._counters["attempts"] += 1
        engine = cast(RelayingEngine, lease.target.engine)
        exchange = await stack.enter_async_context(
            engine.relay(request.request_id, request.path, request.body, request.headers, request.deadline_unix_s)
        )
        first = await exchange.read()
        if first is None:
            raise EngineDiedError("The engine's answer is empty.")
        chunks = await stack.enter_async_context(aclosing(_chunks(first, exchange)))
        if exchange.content_type == EVENT_STREAM:
            return StreamedAnswer(chunks)
        whole = bytearray()
        async for chunk in chunks:
            whole += chunk
            if len(whole) > MAX_ANSWER_BYTES:
                raise EngineDiedError(f"The engine's answer is larger than {MAX_ANSWER_BYTES} bytes.")
        return WholeAnswer(bytes(whole))

    def _follow_up(self, run: Run, error: HeadraceError, lease: Lease) -> None:
        """Note a failed attempt; raises when no other follows."""
        name = lease.target.target_id
        is_gone = not any(one.engine.is_ready for one in self._pool.targets if one.target_id == name)
        run.survive(error, name, is_gone=is_gone)
        if isinstance(error, PressureError):
            self._counters["pressed"] += 1
        elif run.is_moved_by(error) or self._budget.withdraw():
            self._counters["retried"] += 1
        else:
            raise PressureError("Too many requests are being tried again already.") from error


async def _chunks(first: bytes, exchange: Exchange) -> AsyncGenerator[bytes, None]:
    chunk: bytes | None = first
    while chunk is not None:
        yield chunk
        chunk = await exchange.read()
