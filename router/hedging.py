"""Hedged requests (Dean and Barroso, The Tail at Scale, 2013): when a target is slow to answer, another one is asked
too, and who answers first goes on. It costs work, so it is off unless a delay is configured.

To the supervisor a `HedgedLease` is one lease on one target. Both attempts sample with the same seed, so to the client
it does not matter who wins.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import cast

from engine.errors import EngineDiedError, HeadraceError
from engine.protocol import Engine, GenerateRequest, Lease, Outcome, TokenOutput
from router.attempts import outcome_of


class _Entrant:
    """One lease in the race, its stream, and the wait for the stream's first output."""

    def __init__(self, lease: Lease, request: GenerateRequest) -> None:
        self.lease = lease
        self.stream = cast(AsyncGenerator[TokenOutput, None], lease.target.engine.generate(request))
        self.first = asyncio.create_task(self._wait_first())

    async def _wait_first(self) -> TokenOutput:
        try:
            return await anext(self.stream)
        except StopAsyncIteration:
            raise EngineDiedError("The engine left the stream without an end.") from None

    @property
    def outcome(self) -> Outcome:
        """How it went if it ends now, without having won."""
        if not self.first.done() or self.first.cancelled():
            return "cancelled"
        error = self.first.exception()
        return outcome_of(error) if isinstance(error, HeadraceError) else "cancelled"

    async def stop(self) -> None:
        self.first.cancel()
        await asyncio.wait([self.first])
        await self.stream.aclose()

    async def leave(self) -> None:
        """Give up the stream and the lease."""
        outcome = self.outcome
        await self.stop()
        self.lease.release(outcome)


class HedgedLease:
    """A lease on `first`, joined by the one that `choose_second` returns when nothing has come for `delay_s`.

    `target` is the first one until the race is decided, the winner's from then on. Its engine runs the race.
    """

    def __init__(self, first: Lease, choose_second: Callable[[], Awaitable[Lease]], delay_s: float) -> None:
        self._lease = first
        self._engine = _RacingEngine(self, choose_second, delay_s)

    @property
    def target(self) -> _RacingTarget:
        return _RacingTarget(self._lease.target.target_id, self._engine)

    def first_output(self, output: TokenOutput) -> None:
        self._lease.first_output(output)

    def release(self, outcome: Outcome) -> None:
        self._lease.release(outcome)


class _RacingTarget:
    def __init__(self, target_id: str, engine: _RacingEngine) -> None:
        self.target_id = target_id
        self.engine = cast(Engine, engine)


class _RacingEngine:
    """The part of `Engine` that an attempt uses."""

    def __init__(self, hedged: HedgedLease, choose_second: Callable[[], Awaitable[Lease]], delay_s: float) -> None:
        self._hedged = hedged
        self._choose_second = choose_second
        self._delay_s = delay_s
        self._asked: list[Engine] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        entrants = [self._enter(self._hedged._lease, request)]
        try:
            winner = await self._race(entrants, request)
        except BaseException:
            await self._settle(entrants)
            raise
        self._hedged._lease = winner.lease
        for entrant in entrants:
            if entrant is not winner:
                await entrant.leave()
        self._asked = [winner.lease.target.engine]
        async with aclosing(winner.stream) as stream:
            yield winner.first.result()
            async for output in stream:
                yield output

    async def finish(self, request_id: str, keep_tokens: int) -> None:
        for engine in self._asked:
            await engine.finish(request_id, keep_tokens)

    async def abort(self, request_id: str) -> None:
        for engine in self._asked:
            await engine.abort(request_id)

    def _enter(self, lease: Lease, request: GenerateRequest) -> _Entrant:
        self._asked.append(lease.target.engine)
        return _Entrant(lease, request)

    async def _race(self, entrants: list[_Entrant], request: GenerateRequest) -> _Entrant:
        """Return the first entrant that answers. Raises what the last one failed with when all have."""
        done, _ = await asyncio.wait([entrants[0].first], timeout=self._delay_s)
        if not done and (second := await self._second_or_none(entrants[0])) is not None:
            entrants.append(self._enter(second, request))
        running = list(entrants)
        while True:
            await asyncio.wait([entrant.first for entrant in running], return_when=asyncio.FIRST_COMPLETED)
            ended = [entrant for entrant in running if entrant.first.done()]
            for entrant in ended:
                if entrant.first.exception() is None:
                    return entrant
            running = [entrant for entrant in running if entrant not in ended]
            if not running:
                # The supervisor judges by the lease that it sees: let that be the one whose error it gets.
                self._hedged._lease = ended[-1].lease
                ended[-1].first.result()

    async def _second_or_none(self, first: _Entrant) -> Lease | None:
        """Return a lease on another target, or None when there is none or the first one answers meanwhile."""
        choosing = asyncio.ensure_future(self._choose_second())
        try:
            await asyncio.wait([choosing, first.first], return_when=asyncio.FIRST_COMPLETED)
            return choosing.result() if choosing.done() else None
        except HeadraceError:
            return None
        finally:
            if not choosing.done():
                choosing.cancel()
                await asyncio.wait([choosing])
                if not choosing.cancelled() and choosing.exception() is None:
                    choosing.result().release("cancelled")

    async def _settle(self, entrants: list[_Entrant]) -> None:
        """Close all streams. The supervisor releases the lease that it sees; release the other one here."""
        for entrant in entrants:
            await (entrant.stop() if entrant.lease is self._hedged._lease else entrant.leave())
