"""Runs workloads on an engine and notes when tokens came: in a process of its own behind the wire, or in this one.

Both run what users run: the core with its scheduler, prefix cache and runner. A driver is a context manager that loads
the engine; `ready_s` is how long that took.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import msgspec

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineError
from engine.plan import Runner
from engine.protocol import EngineInfo, EngineLoad, GenerateRequest
from engine.wire.client import RemoteEngine
from server.core_process import CoreSpec
from server.parent_watch import child_command

STOP_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Arrivals:
    """When one request's outputs came, in seconds of the performance counter, and how many tokens each had."""

    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    begin_s: float
    end_s: float
    arrivals: list[Arrivals]
    steps: int

    @property
    def wall_s(self) -> float:
        return self.end_s - self.begin_s


class Driver(Protocol):
    info: EngineInfo
    ready_s: float

    def run(self, requests: Sequence[GenerateRequest]) -> Timeline:
        """Send all requests at once and return when the last has ended. Raises EngineError when one fails."""
        ...


class RemoteDriver:
    """The engine's own process and its wire."""

    info: EngineInfo

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._directory = tempfile.TemporaryDirectory(prefix="headrace-")
        self._address = f"ipc://{self._directory.name}/engine"
        self._process: subprocess.Popen[bytes] | None = None
        self._engine: RemoteEngine | None = None
        self.ready_s = 0.0

    def __enter__(self) -> RemoteDriver:
        begin_s = time.perf_counter()
        spec = CoreSpec(config=self._config, address=self._address, log_level="warning")
        self._process = subprocess.Popen(child_command("server.core_process"), stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(spec) + b"\n")
        self._process.stdin.close()
        try:
            self.info = self._loop.run_until_complete(self._wait_ready())
        except BaseException:
            self._close()
            raise
        self.ready_s = time.perf_counter() - begin_s
        _settle()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    async def _wait_ready(self) -> EngineInfo:
        self._engine = RemoteEngine(self._address)
        self._engine.open()
        while (state := self._engine.state()).state != "ready" or state.info is None:
            if state.error is not None:
                raise state.error
            assert self._process is not None
            if self._process.poll() is not None:
                raise EngineError(f"the engine's process ended with exit code {self._process.returncode}")
            try:
                await asyncio.wait_for(self._engine.wait_changed(), 1.0)
            except TimeoutError:
                continue
        return state.info

    def run(self, requests: Sequence[GenerateRequest]) -> Timeline:
        return self._loop.run_until_complete(self._run(requests))

    async def _run(self, requests: Sequence[GenerateRequest]) -> Timeline:
        assert self._engine is not None
        before = await self._engine.load()
        arrivals = [Arrivals() for _ in requests]
        begin_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for request, own in zip(requests, arrivals, strict=True):
                group.create_task(self._read(request, own))
        end_s = time.perf_counter()
        after = await self._engine.load()
        return Timeline(begin_s, end_s, arrivals, _steps(before, after))

    async def _read(self, request: GenerateRequest, arrivals: Arrivals) -> None:
        assert self._engine is not None
        async for output in self._engine.generate(request):
            arrivals.times_s.append(time.perf_counter())
            arrivals.tokens.append(len(output.token_ids))
            if output.cached is not None:
                arrivals.cached_tokens = output.cached.total
            if output.error is not None:
                raise EngineError(output.error)

    def _close(self) -> None:
        if self._engine is not None:
            self._loop.run_until_complete(self._close_engine())
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._loop.close()
        self._directory.cleanup()
        gc.unfreeze()

    async def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()


class LocalDriver:
    """The same core in this process, stepped by this loop: what is left when the process border is taken away."""

    info: EngineInfo

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._core: EngineCore | None = None
        self._runner: Runner | None = None
        self.ready_s = 0.0

    def __enter__(self) -> LocalDriver:
        from engine.runner.build import build_engine

        begin_s = time.perf_counter()
        self.info, runner, num_blocks, _ = build_engine(self._config, lambda fraction, phase: None)
        self._runner = runner
        self._core = EngineCore(self.info, self._config, runner, num_blocks)
        _settle()
        self.ready_s = time.perf_counter() - begin_s
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            self._runner.close()
        self._core = self._runner = None
        gc.unfreeze()

    def run(self, requests: Sequence[GenerateRequest]) -> Timeline:
        core = self._core
        assert core is not None
        before = core.load()
        arrivals = {request.request_id: Arrivals() for request in requests}
        begin_s = time.perf_counter()
        for request in requests:
            core.submit(request)
        while core.has_work:
            outputs = core.step()
            now_s = time.perf_counter()
            for output in outputs:
                own = arrivals[output.request_id]
                own.times_s.append(now_s)
                own.tokens.append(len(output.token_ids))
                if output.cached is not None:
                    own.cached_tokens = output.cached.total
                if output.error is not None:
                    raise EngineError(output.error)
        return Timeline(begin_s, time.perf_counter(), list(arrivals.values()), _steps(before, core.load()))


def _settle() -> None:
    """As the engine's process does: a full collection of what is loaded takes longer than a step of a large batch."""
    gc.collect()
    gc.freeze()


def _steps(before: EngineLoad, after: EngineLoad) -> int:
    return after.steps_total - before.steps_total


def measure_ceilings(model: str, rows: Sequence[int]) -> bytes:
    """Run engine/runner/ceilings.py in a process of its own, which gives the device's memory back; return its JSON."""
    command = [sys.executable, "-m", "engine.runner.ceilings", model, *map(str, rows)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=dict(os.environ))
    return done.stdout.splitlines()[-1]
