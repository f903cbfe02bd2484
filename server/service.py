"""What all routes share: the served models, metrics, running requests. Owned by the app's lifespan."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from engine.errors import HeadraceError, LoadingError, RequestError
from engine.protocol import EngineLoad
from kvstore.keys import PUBLIC_SCOPE, tenant_scope
from router.decision import Decision
from router.fleet import total_load
from server.access.record import Caller, RequestRecord
from server.config import ServeConfig
from server.errors import UnknownModelError
from server.health import STATUSES, ServiceState
from server.metrics import ServerMetrics
from server.request_body import BodyMemory
from server.served_model import ServedModel
from server.traffic import Traffic, draining_error

PREPARING = 32
"""Requests that are parsed and tokenised at once. Of thousands that arrive together the others wait, so that streams
and probes get their turn in between."""

PARTING = 64
"""Requests that are ended at once because their clients left: a proxy that dies takes thousands with it."""


class Models(Protocol):
    """The models of one process. Their number may change while it runs."""

    def served(self) -> Sequence[ServedModel]: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class Service:
    """Opens before any model is ready and refuses the routes of models until then."""

    def __init__(self, models: Models, config: ServeConfig, scope_secret: bytes) -> None:
        self.models = models
        self.config = config
        self.metrics = ServerMetrics()
        self.traffic = Traffic()
        self.body_memory = BodyMemory(config.max_body_bytes)
        self.preparing = asyncio.Semaphore(PREPARING)
        self.parting = asyncio.Semaphore(PARTING)
        self.tenants: Callable[[], Collection[str]] | None = None
        """Tells who has a key; None where none are asked for."""
        self._scope_secret = scope_secret

    def state(self) -> ServiceState:
        """Of the model that is best off: a server that can answer for one of them is of use."""
        states = [model.state() for model in self.models.served()] or [ServiceState("loading", progress=0.0)]
        best = min(states, key=lambda state: STATUSES.index(state.status))
        return ServiceState("draining") if best.status == "ready" and self.traffic.draining else best

    def check_open(self) -> None:
        """Raise what every model route answers while no model can be asked: not yet, or no more."""
        if self.traffic.draining:
            raise draining_error()
        failure: HeadraceError = LoadingError("No model is there yet.", progress=0.0)
        for model in self.models.served():
            try:
                model.check_open()
                return
            except HeadraceError as error:
                failure = error
        raise failure

    def model(self, name: str | None) -> ServedModel:
        """Return the model of this name, or the only one there is when the client names none.

        Raises UnknownModelError, or whatever it is that keeps the model from answering.
        """
        served = self.models.served()
        asked = [model for model in served if name in (None, model.name)]
        if asked and (name is not None or len(served) == 1) and not self.traffic.draining:
            asked[0].check_open()
            return asked[0]
        self.check_open()
        if name is None and len(served) > 1:
            raise RequestError(
                "Several models are served here: say which.", param="model", code="missing_required_parameter"
            )
        raise UnknownModelError(str(name), [model.name for model in served if model.name is not None])

    async def load(self) -> EngineLoad:
        """Return the sum over the models that answer."""
        models = self.models.served()
        if not models:
            raise LoadingError("No model is there yet.", progress=0.0)
        return await total_load([model.engine for model in models])

    def follow(self, request_id: str) -> Callable[[], list[Decision]]:
        """Return what tells where a request has been sent since now, and why."""
        trails = [model.follow(request_id) for model in self.models.served()]
        return lambda: [decision for trail in trails for decision in trail]

    def cache_scope(self, tenant: str | None, salt: str | None) -> bytes:
        """Requests share cached blocks only with requests of the same scope. `tenant` None: no keys are asked for."""
        if tenant is None and salt is None:
            return PUBLIC_SCOPE
        return tenant_scope(self._scope_secret, tenant or "", salt or "")

    def caller(self, record: RequestRecord) -> Caller:
        """Begin the time of a request that has just arrived."""
        timeout_s = self.config.request_timeout_s
        deadline_unix_s = None if timeout_s is None else time.time() + timeout_s
        return Caller(record.tenant, deadline_unix_s, record.trace, record.session, record.priority)
