"""Engines that fail on cue, and a supervisor over several of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from engine.config import EngineConfig
from engine.errors import EngineDiedError, HeadraceError, LoadingError
from engine.protocol import CachedTokens, EngineInfo, EngineLoad, GenerateRequest, TokenOutput
from router.attempts import Limits
from router.supervisor import Supervisor
from tests.support.scripted_engine import ASSET, scripted_info, scripted_token
from tests.support.static_pool import StaticPool, StaticTarget

Act = Callable[["CueEngine", GenerateRequest], Awaitable[None]]


class CueEngine:
    """Plays one act per attempt: how many tokens come, and what happens then. Without acts left it just works."""

    def __init__(self, acts: Sequence[tuple[int, Act]] = ()) -> None:
        self.acts = list(acts)
        self.seen: list[GenerateRequest] = []
        self.finished: list[tuple[str, int]] = []
        self.is_ready = True
        self.live = 0
        self.at_its_act = asyncio.Event()
        self.ready_again = asyncio.Event()
        self.ended_as: str | None = None
        self.end = asyncio.Event()

    async def wait_ready(self) -> EngineInfo:
        while not self.is_ready:
            await self.ready_again.wait()
        return scripted_info(EngineConfig())

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        self.seen.append(request)
        count, act = self.acts.pop(0) if self.acts else (1 << 30, go_on)
        assert request.sampling.seed is not None
        start = index = len(request.resume_ids)
        self.live += 1
        try:
            while True:
                if index - start == count:
                    self.at_its_act.set()
                    await act(self, request)
                await asyncio.sleep(0)
                if self.ended_as is not None:
                    yield TokenOutput(request.request_id, request.attempt, index, [], self.ended_as)  # type: ignore[arg-type]
                    return
                is_last = index + 1 == request.sampling.max_tokens
                yield TokenOutput(
                    request.request_id,
                    request.attempt,
                    index,
                    [scripted_token(request.sampling.seed, index)],
                    "length" if is_last else None,
                    cached=CachedTokens(device=64 + start) if index == start else None,
                )
                if is_last:
                    return
                index += 1
        finally:
            self.live -= 1

    async def finish(self, request_id: str, keep_tokens: int) -> None:
        self.finished.append((request_id, keep_tokens))
        self.ended_as = "stop"
        self.end.set()

    async def abort(self, request_id: str) -> None:
        self.ended_as = "abort"
        self.end.set()

    async def describe(self) -> EngineInfo:
        if not self.is_ready:
            raise LoadingError("loading", progress=0.5)
        return scripted_info(EngineConfig())

    async def fetch_asset(self, digest: str) -> bytes:
        return ASSET

    async def load(self) -> EngineLoad:
        if not self.is_ready:
            raise EngineDiedError("gone")
        return EngineLoad(running=self.live, requests_total={"length": 2})

    async def drain(self) -> None:
        self.is_ready = False


async def go_on(engine: CueEngine, request: GenerateRequest) -> None: ...


async def die(engine: CueEngine, request: GenerateRequest) -> None:
    raise EngineDiedError("killed")


async def die_for_good(engine: CueEngine, request: GenerateRequest) -> None:
    engine.is_ready = False
    raise EngineDiedError("killed")


async def hang(engine: CueEngine, request: GenerateRequest) -> None:
    await asyncio.Event().wait()


def refuse(error: Exception) -> Act:
    async def act(engine: CueEngine, request: GenerateRequest) -> None:
        raise error

    return act


class Stage:
    """Targets t0, t1, ... in one pool, and the supervisor in front of it."""

    def __init__(self, *engines: CueEngine, hedge_after_s: float | None = None, **limits: Any) -> None:  # noqa: ANN401
        self.engines = engines
        self.pool = StaticPool([StaticTarget(f"t{n}", engine) for n, engine in enumerate(engines)], patience_s=20)
        self.supervisor = Supervisor(
            self.pool, limits=Limits(first_pause_s=0.001, max_pause_s=0.002, **limits), hedge_after_s=hedge_after_s
        )

    async def collect(self, request: GenerateRequest) -> list[TokenOutput]:
        return [output async for output in self.supervisor.generate(request)]

    async def collect_until_failure(
        self, request: GenerateRequest, pause_s: float = 0
    ) -> tuple[list[TokenOutput], Exception]:
        """Return what came before the error, and the error."""
        seen: list[TokenOutput] = []
        try:
            async for output in self.supervisor.generate(request):
                seen.append(output)
                await asyncio.sleep(pause_s)
        except HeadraceError as error:
            return seen, error
        raise AssertionError("the stream did not fail")

    def assert_clean(self) -> None:
        assert self.supervisor.num_running == 0
        assert set(self.pool.in_flight.values()) == {0}
        assert [engine.live for engine in self.engines] == [0] * len(self.engines)
