"""What all routes share: the engine, the model's text, metrics, running requests. Owned by the app's lifespan."""

from __future__ import annotations

import asyncio
import logging
import time

from engine.errors import EngineError, HeadraceError, LoadingError, PressureError
from engine.protocol import Admin, Engine
from kvstore.keys import PUBLIC_SCOPE, tenant_scope
from server.access.record import Caller
from server.config import ServeConfig
from server.errors import UnknownModelError
from server.health import Readiness, ServiceState
from server.metrics import ServerMetrics
from server.request_body import BodyMemory
from server.text_service import TextService
from server.traffic import Traffic, draining_error

logger = logging.getLogger("headrace.http")

RETRY_DESCRIBE_S = 0.2

PREPARING = 32
"""Requests that are parsed and tokenised at once. Of thousands that arrive together the others wait, so that streams
and probes get their turn in between."""

PARTING = 64
"""Requests that are ended at once because their clients left: a proxy that dies takes thousands with it."""


class Service:
    """Opens before the model is ready and refuses its routes until then."""

    def __init__(
        self, engine: Engine, config: ServeConfig, readiness: Readiness, scope_secret: bytes, admin: Admin | None
    ) -> None:
        self.engine = engine
        self.admin = admin
        self.config = config
        self.metrics = ServerMetrics()
        self.traffic = Traffic()
        self.body_memory = BodyMemory(config.max_body_bytes)
        self.preparing = asyncio.Semaphore(PREPARING)
        self.parting = asyncio.Semaphore(PARTING)
        self._readiness = readiness
        self._scope_secret = scope_secret
        self._text: TextService | None = None
        self._failure: str | None = None
        self.opened = asyncio.Event()
        """Set once the model's text is there, and not reset."""
        self._bring_up: asyncio.Task[None] | None = None

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
        if state.status == "ready" and self._text is None:
            return ServiceState("loading", progress=1.0)
        if state.status == "ready" and self.traffic.draining:
            return ServiceState("draining")
        return state

    def require_text(self) -> TextService:
        """Return the model's text service. Raise what a model route answers while there is none, or no more.

        A restarting engine is no reason to refuse: its supervisor lets requests wait.
        """
        if self.traffic.draining or self._readiness.state().status == "draining":
            raise draining_error()
        if self._text is None:
            progress = self.state().progress or 0.0
            raise LoadingError(f"The model is loading ({progress:.0%}).", progress=progress)
        return self._text

    def check_model(self, name: str) -> None:
        served = self.require_text().info.model
        if name != served:
            raise UnknownModelError(name, [served])

    def cache_scope(self, tenant: str | None, salt: str | None) -> bytes:
        """Requests share cached blocks only with requests of the same scope. `tenant` None: no keys are asked for."""
        if tenant is None and salt is None:
            return PUBLIC_SCOPE
        return tenant_scope(self._scope_secret, tenant or "", salt or "")

    def caller(self, tenant: str | None) -> Caller:
        """Begin the time of a request that has just arrived."""
        timeout_s = self.config.request_timeout_s
        return Caller(tenant, None if timeout_s is None else time.time() + timeout_s)

    async def _open_text(self) -> None:
        """Wait for the engine and fetch the model's text assets. What may pass is tried again, the rest is told."""
        while self._text is None:
            try:
                await self._readiness.wait_ready()
                self._text = await TextService.open(self.engine, await self.engine.describe())
                self.opened.set()
            except (PressureError, EngineError):
                await asyncio.sleep(RETRY_DESCRIBE_S)
            except Exception as error:
                logger.exception("the model's text assets cannot be used")
                self._failure = str(error) if isinstance(error, HeadraceError) else "the model's text assets are broken"
                return
