"""An operator's orders, given to every engine of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.errors import EngineDiedError, UnsupportedError
from engine.protocol import Admin


class EveryAdmin:
    """Engines that are gone have nothing to be done with: their cache and their requests are gone as well. What one of
    them cannot do is told when the others have done it."""

    def __init__(self, engines: Callable[[], Sequence[Admin]]) -> None:
        self._engines = engines

    async def reset_prefix_cache(self) -> None:
        refusal: UnsupportedError | None = None
        for engine in self._engines():
            try:
                await engine.reset_prefix_cache()
            except EngineDiedError:
                continue
            except UnsupportedError as error:
                refusal = error
        if refusal is not None:
            raise refusal

    async def abort_requests(self, request_id: str) -> int:
        count = 0
        for engine in self._engines():
            try:
                count += await engine.abort_requests(request_id)
            except EngineDiedError:
                continue
        return count
