"""One served model: the engine that answers for it, what is known of that engine's state, and the model's text.

Knows no HTTP. It is there before the model is ready, and says how far that is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from prometheus_client.registry import Collector

from engine.errors import EngineError, HeadraceError, LoadingError, PressureError, UnsupportedError
from engine.kv.store_orders import StoreAdmin
from engine.protocol import Admin, Engine, EngineInfo
from router.decision import Decision
from server.foreign.relay_supervisor import RelaySupervisor
from server.health import Readiness, ServiceState
from server.text_service import TextService
from server.traffic import draining_error

logger = logging.getLogger("headrace.http")

RETRY_DESCRIBE_S = 0.2
RETRY_BROKEN_S = 5.0
"""Another engine may be there by then, whose text is right."""


class ServedModel:
    """`start` on the loop that uses it, `close` at the end. `name` is None until the engine has told it, unless it was
    known beforehand. `admin` None: its engines take no orders. `collector` has metrics of its engines. `follow`
    returns what becomes a list of where a request is sent, and why. With `relays` its engines give text only, and
    clients' requests are passed on to them. `stores` returns who takes orders to KV stores, by target id."""

    def __init__(
        self,
        engine: Engine,
        readiness: Readiness,
        *,
        name: str | None = None,
        admin: Admin | None = None,
        collector: Collector | None = None,
        follow: Callable[[str], Sequence[Decision]] = lambda request_id: (),
        relays: RelaySupervisor | None = None,
        stores: Callable[[], Mapping[str, StoreAdmin]] = dict,
    ) -> None:
        self.engine = engine
        self.relays = relays
        self.admin = admin
        self.collector = collector
        self.follow = follow
        self.stores = stores
        self.opened = asyncio.Event()
        """Set once the model's text is there, or its first relay, and not reset."""
        self._name = name
        self._info: EngineInfo | None = None
        self._readiness = readiness
        self._text: TextService | None = None
        self._failure: str | None = None
        self._bring_up: asyncio.Task[None] | None = None

    @property
    def name(self) -> str | None:
        return self._name if self._info is None else self._info.model

    def start(self) -> None:
        self._bring_up = asyncio.create_task(self._open_text())

    async def close(self) -> None:
        if self._bring_up is not None:
            self._bring_up.cancel()
            await asyncio.wait([self._bring_up])
        if self._text is not None:
            self._text.close()

    def state(self) -> ServiceState:
        if self._failure is not None:
            return ServiceState("failed", error=self._failure)
        state = self._readiness.state()
        if state.status == "ready" and self._info is None:
            return ServiceState("loading", progress=1.0)
        return state

    @property
    def info(self) -> EngineInfo:
        """What its engines say of themselves. Raises as `check_open`."""
        return self._opened()

    def check_open(self) -> None:
        """Raise what a model route answers while the model cannot be asked, or no more.

        A restarting engine is no reason to refuse: its supervisor lets requests wait.
        """
        self._opened()

    def require_text(self) -> TextService:
        """Return the model's text service. Raises as `check_open`, and UnsupportedError where engines make the text."""
        self._opened()
        if self._text is None:
            raise UnsupportedError("This model's text is made elsewhere: only completions can be asked for.")
        return self._text

    def _opened(self) -> EngineInfo:
        if self._readiness.state().status == "draining":
            raise draining_error()
        if self._info is None:
            progress = self.state().progress or 0.0
            raise LoadingError(f"The model is loading ({progress:.0%}).", progress=progress)
        return self._info

    async def _open_text(self) -> None:
        """Wait for the engine and fetch the model's text assets. What may pass is tried again, the rest is told."""
        while self._info is None:
            try:
                await self._readiness.wait_ready()
                info = await self.engine.describe()
                if self.relays is None:
                    self._text = await TextService.open(self.engine, info)
                self._info, self._failure = info, None
                self.opened.set()
            except (PressureError, EngineError):
                await asyncio.sleep(RETRY_DESCRIBE_S)
            except Exception as error:
                if self._failure is None:
                    logger.exception("the model's text assets cannot be used")
                self._failure = str(error) if isinstance(error, HeadraceError) else "the model's text assets are broken"
                await asyncio.sleep(RETRY_BROKEN_S)
