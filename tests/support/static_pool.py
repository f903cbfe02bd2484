"""A pool of a fixed list of engines: waits for a ready one, takes the least busy, and counts what is under way.

In-flight counts are kept by leases alone, which are taken in `choose` and released once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.errors import PressureError
from engine.protocol import GenerateRequest, Lease, Outcome, TokenOutput
from router.readiness import PATIENCE_S, WatchedEngine, refuse_while_loading, wait_for_any


@dataclass(frozen=True)
class StaticTarget:
    """A `Target` of a fixed list. Its owner opens and closes the engine."""

    target_id: str
    engine: WatchedEngine

    def takes(self, request: GenerateRequest) -> bool:
        return True


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
                await refuse_while_loading(allowed)
            await wait_for_any(
                [target.engine.wait_ready() for target in allowed], request.deadline_unix_s, self._patience_s
            )
        self._served_once = True
        target = min(ready, key=lambda candidate: self._in_flight[candidate.target_id])
        self._in_flight[target.target_id] += 1
        return StaticLease(self, target)

    def _release(self, target: StaticTarget, outcome: Outcome) -> None:
        self._in_flight[target.target_id] -= 1
        self.outcomes[outcome] += 1
