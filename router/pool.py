"""A pool of a fixed list of engines: waits for a ready one, takes the least busy, and counts what is under way.

In-flight counts are kept by leases alone, which are taken in `choose` and released once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.errors import DeadlineError, HeadraceError, LoadingError, PressureError
from engine.protocol import Engine, EngineInfo, GenerateRequest, Lease, Outcome, TokenOutput

PATIENCE_S = 120.0
"""How long a request without a deadline waits for an engine to come back."""


class WatchedEngine(Engine, Protocol):
    """An engine of which it is known whether it can serve."""

    @property
    def is_ready(self) -> bool: ...

    async def wait_ready(self) -> EngineInfo:
        """Return when it can serve; never raise."""
        ...


@dataclass(frozen=True)
class StaticTarget:
    """A `Target` of a fixed list. Its owner opens and closes the engine."""

    target_id: str
    engine: WatchedEngine


class StaticLease:
    """One request on one target."""

    def __init__(self, pool: StaticPool, target: StaticTarget) -> None:
        self.target = target
        self._pool: StaticPool | None = pool

    def first_output(self, output: TokenOutput) -> None:
        """Nothing here depends on it."""

    def release(self, outcome: Outcome) -> None:
        """Give the claim back. Only the first call counts."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._release(self.target, outcome)


class StaticPool:
    """`outcomes` counts ended leases by how they ended, over all targets."""

    def __init__(self, targets: Sequence[StaticTarget], *, patience_s: float = PATIENCE_S) -> None:
        self.targets = tuple(targets)
        self.outcomes: Counter[Outcome] = Counter()
        self._patience_s = patience_s
        self._in_flight = dict.fromkeys((target.target_id for target in targets), 0)
        self._served_once = False

    @property
    def in_flight(self) -> dict[str, int]:
        """Leases not yet released, by target."""
        return dict(self._in_flight)

    async def choose(self, request: GenerateRequest, exclude: Collection[str]) -> Lease:
        """See `Pool`. Also raises LoadingError while no target has ever been ready: waiting may take minutes then, and
        the client had better know."""
        allowed = [target for target in self.targets if target.target_id not in exclude]
        if not allowed:
            raise PressureError("No engine has room.")
        while not (ready := [target for target in allowed if target.engine.is_ready]):
            if not self._served_once:
                await self._refuse_while_loading(allowed)
            await self._wait_for_any(allowed, request)
        self._served_once = True
        target = min(ready, key=lambda candidate: self._in_flight[candidate.target_id])
        self._in_flight[target.target_id] += 1
        return StaticLease(self, target)

    def _release(self, target: StaticTarget, outcome: Outcome) -> None:
        self._in_flight[target.target_id] -= 1
        self.outcomes[outcome] += 1

    async def _refuse_while_loading(self, targets: Sequence[StaticTarget]) -> None:
        for target in targets:
            try:
                await target.engine.describe()
            except LoadingError:
                raise
            except HeadraceError:
                # Lost before it was ever ready: wait for it as for any lost one.
                continue

    async def _wait_for_any(self, targets: Sequence[StaticTarget], request: GenerateRequest) -> None:
        left_s = self._patience_s
        if request.deadline_unix_s is not None:
            left_s = max(0.0, request.deadline_unix_s - time.time())
        waits = [asyncio.ensure_future(target.engine.wait_ready()) for target in targets]
        try:
            done, _ = await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if done:
            return
        if request.deadline_unix_s is not None:
            raise DeadlineError("The request's deadline passed while no engine was ready.")
        raise PressureError(f"No engine became ready within {self._patience_s:g} s.", retry_after_s=5.0)
