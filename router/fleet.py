"""Questions to several engines that serve the same model, answered as if by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from engine.errors import EngineDiedError, HeadraceError
from engine.protocol import Engine, EngineInfo, EngineLoad

T = TypeVar("T")


async def _first_answer(engines: Sequence[Engine], ask: Callable[[Engine], Awaitable[T]]) -> T:
    """Return the first answer; when there is none, raise what the last one said."""
    failure: HeadraceError = EngineDiedError("There is no engine.")
    for engine in engines:
        try:
            return await ask(engine)
        except HeadraceError as error:
            failure = error
    raise failure


async def describe_any(engines: Sequence[Engine]) -> EngineInfo:
    """Return what the first engine that answers says of itself: they all serve the same model."""
    return await _first_answer(engines, lambda engine: engine.describe())


async def fetch_from_any(engines: Sequence[Engine], digest: str) -> bytes:
    """Return a text asset from the first engine that has it: an asset is named by its content."""
    return await _first_answer(engines, lambda engine: engine.fetch_asset(digest))


async def total_load(engines: Sequence[Engine]) -> EngineLoad:
    """Return the sum over the engines that answer. "draining" is when all of them do."""
    loads = []
    failure: HeadraceError = EngineDiedError("There is no engine.")
    for engine in engines:
        try:
            loads.append(await engine.load())
        except HeadraceError as error:
            failure = error
    if not loads:
        raise failure
    return _sum_loads(loads)


def _sum_loads(loads: Sequence[EngineLoad]) -> EngineLoad:
    requests: Counter[str] = Counter()
    for load in loads:
        requests.update(load.requests_total)
    numbers = {
        name: sum(getattr(load, name) for load in loads)
        for name in EngineLoad.__struct_fields__
        if name not in ("requests_total", "draining", "kv_store")
    }
    total: EngineLoad = msgspec.convert(
        {**numbers, "requests_total": dict(requests), "draining": all(load.draining for load in loads)}, EngineLoad
    )
    return total


async def drain_all(engines: Sequence[Engine]) -> None:
    """Ask every engine to drain. One that is gone has nothing to drain."""
    for engine in engines:
        try:
            await engine.drain()
        except EngineDiedError:
            continue
