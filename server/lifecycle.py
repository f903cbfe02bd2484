"""The children of one command from their start to their end: engine cores, and what stands before them.

SIGTERM or SIGINT ends them in order and with time for what runs, a second signal ends everything at once. Knows neither
registries nor HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence

from server.child import Child, stop_children
from server.local_core import LocalCore

log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
"""What a child gets beyond the drain before it is killed."""


class Lifecycle:
    """Lives for one `run()`. `on_stop` is called when the end begins. `run` opens the cores, the caller closes them."""

    def __init__(
        self,
        cores: Sequence[LocalCore],
        fronts: Sequence[Child],
        drain_timeout_s: float,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._cores = cores
        self._fronts = fronts
        self._children = [*fronts, *(core.child for core in cores)]
        self._drain_timeout_s = drain_timeout_s
        self._on_stop = on_stop
        self._stop = asyncio.Event()
        self._signals: list[int] = []

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    async def run(self) -> int:
        """Return the exit code. Raises why a core gave up (its model cannot be loaded)."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self.signal, signum)
        for core in self._cores:
            core.open()
        cores = [asyncio.create_task(core.child.keep_running()) for core in self._cores]
        fronts = [asyncio.create_task(front.keep_running()) for front in self._fronts]
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({stop, *cores, *fronts}, return_when=asyncio.FIRST_COMPLETED)
            failed = [core for core, life in zip(self._cores, cores, strict=True) if life.done()]
            failure = await failed[0].failure() if failed and not self.is_stopping else None
            self._begin_stop()
            drain_s = 0.0 if failure else self._drain_timeout_s
            if fronts:
                # Streams need their engine to their end, so those go last, with nothing left to do.
                await stop_children(self._fronts, fronts, STOP_GRACE_S + drain_s)
                drain_s = 0.0
            await stop_children([core.child for core in self._cores], cores, STOP_GRACE_S + drain_s)
        finally:
            self._kill_all()
            ended = await asyncio.gather(*cores, *fronts, return_exceptions=True)
            stop.cancel()
        for result in ended:
            if isinstance(result, BaseException):
                raise result
        if failure is not None:
            raise failure
        return 128 + self._signals[-1] if len(self._signals) > 1 else 0

    def signal(self, signum: int) -> None:
        """What a signal does."""
        self._signals.append(signum)
        if len(self._signals) > 1:
            self._kill_all()
            return
        log.info("stopping: running requests may take %g s more", self._drain_timeout_s)
        self._begin_stop()

    def _begin_stop(self) -> None:
        self._stop.set()
        self._on_stop()

    def _kill_all(self) -> None:
        for child in self._children:
            child.stop(signal.SIGKILL)
