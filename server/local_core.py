"""One engine core of this process: its child process, this process's own connection to it, and a look at its loop.

A core that dies is started again, and so is one that is stuck.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from engine.errors import HeadraceError, ModelError
from engine.wire.client import RemoteEngine
from server.child import Child, ChildSpec
from server.config import CoresConfig
from server.loop_watch import LOOKS, LoopWatch

log = logging.getLogger(__name__)

MODEL_FAILED_CODE = 2

REASON_TIMEOUT_S = 5.0
"""How long the reason of a failure may be on its way."""


class LocalCore:
    """`engine` watches its load; `open` and `close` are on the loop that uses it. `on_change` is called when the core
    becomes stuck, and when it gets on."""

    def __init__(
        self,
        spec: ChildSpec,
        engine: RemoteEngine,
        config: CoresConfig,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.child = Child(spec, final_codes={MODEL_FAILED_CODE})
        self.engine = engine
        self.is_stuck = False
        self._config = config
        self._on_change = on_change
        self._look_s = min(config.unready_after_s, config.restart_after_s or config.unready_after_s) / LOOKS
        self._loop_watch = LoopWatch(engine, self._look_s)
        self._watching: asyncio.Task[None] | None = None

    def open(self) -> None:
        self.engine.open()
        self._watching = asyncio.create_task(self._watch())

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self.engine.close()

    @property
    def is_ready(self) -> bool:
        return self.engine.is_ready and not self.is_stuck

    async def failure(self) -> HeadraceError:
        """Return why its process gave up. It told the wire before it ended."""
        try:
            async with asyncio.timeout(REASON_TIMEOUT_S):
                while (error := self.engine.state().error) is None:
                    await self.engine.wait_changed()
        except TimeoutError:
            return ModelError("The model cannot be loaded.", hint="The log above has the reason.")
        return error

    async def _watch(self) -> None:
        unready_after_s, restart_after_s = self._config.unready_after_s, self._config.restart_after_s
        while True:
            await asyncio.sleep(self._look_s)
            self._loop_watch.look(self.child.pid)
            is_stuck = self._loop_watch.is_stuck_for(unready_after_s)
            if is_stuck != self.is_stuck:
                self.is_stuck = is_stuck
                if is_stuck:
                    log.warning("%s has not answered for %g s", self.child.spec.name, unready_after_s)
                self._on_change()
            if restart_after_s is not None and self._loop_watch.is_stuck_for(restart_after_s):
                log.error("%s is stuck: it is killed and started again", self.child.spec.name)
                self.child.kill()
