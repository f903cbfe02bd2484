"""Records for tests of registries, and a watcher that remembers what it has seen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

from router.registry.base import GatewayRecord, RankAddress, WorkerRecord

R = TypeVar("R")


def worker(worker_id: str = "w0", **fields: object) -> WorkerRecord:
    plain: dict[str, object] = {
        "worker_id": worker_id,
        "incarnation": "1",
        "model": "tiny",
        "state": "ready",
        "ranks": (RankAddress(dp_rank=0, wire="tcp://10.0.0.1:5570"),),
        "compatibility": "a" * 64,
    }
    return WorkerRecord(**{**plain, **fields})  # type: ignore[arg-type]


def gateway(gateway_id: str = "g0", **fields: object) -> GatewayRecord:
    plain: dict[str, object] = {"gateway_id": gateway_id, "incarnation": "1", "dispatches": "tcp://10.0.0.1:5580"}
    return GatewayRecord(**{**plain, **fields})  # type: ignore[arg-type]


class Watcher(Generic[R]):
    """Follows one watch. `lists` are all that it has yielded."""

    def __init__(self, watch: AsyncIterator[tuple[R, ...]]) -> None:
        self.lists: list[tuple[R, ...]] = []
        self._changed = asyncio.Condition()
        self._task = asyncio.create_task(self._follow(watch))

    @property
    def latest(self) -> tuple[R, ...]:
        return self.lists[-1] if self.lists else ()

    async def until(self, holds: Callable[[tuple[R, ...]], bool], *, limit_s: float = 60.0) -> tuple[R, ...]:
        """Return the first list from now on, the present one included, for which it holds."""
        async with asyncio.timeout(limit_s), self._changed:
            await self._changed.wait_for(lambda: bool(self.lists) and holds(self.lists[-1]))
            return self.lists[-1]

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _follow(self, watch: AsyncIterator[tuple[R, ...]]) -> None:
        async for records in watch:
            async with self._changed:
                self.lists.append(records)
                self._changed.notify_all()


def ids(records: tuple[WorkerRecord, ...]) -> list[str]:
    return [record.worker_id for record in records]
