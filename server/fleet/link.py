"""The connection to one rank of one worker, and what has been learnt over it. One link lives as long as its address.

What all connections have in common is `FleetLink`; those to workers of other makes are server/fleet/foreign_link.py's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from engine.errors import ConfigError
from engine.kv.store_orders import StoreAdmin
from engine.protocol import Admin, EngineInfo, EngineLoad, GenerateRequest
from engine.wire.client import RemoteEngine
from engine.wire.curve import KeyPair
from engine.wire.remote_state import RemoteState
from kvstore.manager.figures import StoreStats
from router.readiness import WatchedEngine
from router.registry.base import RankAddress, WorkerRecord
from router.registry.compat import compatibility_digest
from server.worker.addresses import is_reachable_from_outside

log = logging.getLogger("headrace.fleet")

SILENT_AT_FIRST_S = 10.0
"""An engine answers also while it loads its model."""

RETIRE_POLL_S = 0.2
RETIRE_SILENT_LOOKS = 150
"""In a row: 30 s, which is longer than steps take."""


def target_id(worker_id: str, dp_rank: int) -> str:
    return f"{worker_id}/{dp_rank}"


class EventsPlace(NamedTuple):
    """Where a target's KV events are read. `public_key` secures the sockets; `is_foreign` is for publishers whose
    hashes are not our keys."""

    address: str
    replay: str | None
    public_key: str | None = None
    is_foreign: bool = False
    topic: str = ""


class FleetEngine(WatchedEngine, Admin, StoreAdmin, Protocol):
    """An engine somewhere else. `frames_received` grows with whatever it says."""

    on_load: Callable[[EngineLoad], None] | None

    @property
    def address(self) -> str: ...

    @property
    def frames_received(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    def state(self) -> RemoteState: ...

    def give_up(self, reason: str) -> None: ...


class FleetLink(Protocol):
    """A `Target` and its connection. `info` is what the engine has said of itself, while it can be reached; `digest`
    what decides with whom it may serve, once it is known; `tells_tokens` whether its load counts tokens."""

    record: WorkerRecord

    @property
    def target_id(self) -> str: ...

    @property
    def engine(self) -> FleetEngine: ...

    @property
    def dp_rank(self) -> int: ...

    @property
    def info(self) -> EngineInfo | None: ...

    @property
    def digest(self) -> str | None: ...

    @property
    def events(self) -> EventsPlace | None: ...

    @property
    def tells_tokens(self) -> bool: ...

    @property
    def kv_store(self) -> StoreStats | None:
        """What the engine's KV store has told with its last load."""
        ...

    def takes(self, request: GenerateRequest) -> bool: ...

    def leads_to(self, record: WorkerRecord, rank: RankAddress | None) -> bool: ...

    def open(self) -> None: ...

    async def close(self) -> None:
        """Its streams end with EngineDiedError."""
        ...

    async def retire(self) -> None:
        """Close once its streams have ended: being on no list is no reason to break them."""
        ...


async def streams_ended(engine: FleetEngine) -> None:
    """Wait for the streams of an engine that nobody watches any more: until they have ended, or it is silent for too
    long, and they had better go on elsewhere."""
    frames, silent_looks = engine.frames_received, 0
    while engine.num_running and silent_looks < RETIRE_SILENT_LOOKS:
        await asyncio.sleep(RETIRE_POLL_S)
        silent_looks = silent_looks + 1 if frames == engine.frames_received else 0
        frames = engine.frames_received


def _is_remote(rank: RankAddress) -> bool:
    addresses = (rank.wire, rank.events, rank.events_replay)
    return any(is_reachable_from_outside(one) for one in addresses if one is not None)


class RankLink:
    """A `Target`. `on_change(link, is_new_process)` is called whenever the engine's state changes, and at first.

    Raises ConfigError for a record whose worker cannot be spoken to with these keys.
    """

    tells_tokens = True

    def __init__(
        self,
        record: WorkerRecord,
        rank: RankAddress,
        keys: KeyPair | None,
        on_change: Callable[[RankLink, bool], None],
        *,
        insecure: bool = False,
    ) -> None:
        self.record = record
        self.rank = rank
        self.target_id = target_id(record.worker_id, rank.dp_rank)
        if record.public_key is not None and keys is None:
            raise ConfigError("It asks for keys, and this gateway has no --wire-key-file.")
        if record.public_key is None and keys is not None and not insecure and _is_remote(rank):
            raise ConfigError(
                "It has no key, and what is sent to it could be read on the way.",
                hint="Give the worker --wire-key-file, or this gateway --insecure.",
            )
        secured = keys if record.public_key is not None else None
        self.engine = RemoteEngine(rank.wire, keys=secured, server_key=record.public_key, watch_load=True)
        self._on_change = on_change
        self._tasks: list[asyncio.Task[None]] = []

    def takes(self, request: GenerateRequest) -> bool:
        """What an engine of ours cannot do, it says itself."""
        return True

    def leads_to(self, record: WorkerRecord, rank: RankAddress | None) -> bool:
        """Whether it is the connection that a record asks for. Which process answers there is learnt over it."""
        if rank is None:
            return False
        same_process = msgspec.structs.replace(rank, incarnation=self.rank.incarnation)
        return (same_process, record.public_key, record.model) == (self.rank, self.record.public_key, self.record.model)

    @property
    def info(self) -> EngineInfo | None:
        """What the engine has said of itself, while it can be reached."""
        return self.engine.state().info

    @property
    def kv_store(self) -> StoreStats | None:
        load = self.engine.latest_load
        return None if load is None else load.kv_store

    @property
    def dp_rank(self) -> int:
        return self.rank.dp_rank

    @property
    def digest(self) -> str | None:
        return self.record.compatibility or (None if self.info is None else compatibility_digest(self.info))

    @property
    def events(self) -> EventsPlace | None:
        if self.rank.events is None:
            return None
        return EventsPlace(self.rank.events, self.rank.events_replay, self.record.public_key)

    def open(self) -> None:
        self.engine.open()
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._tell_if_silent())]

    async def close(self) -> None:
        """Its streams end with EngineDiedError."""
        for task in self._tasks:
            task.cancel()
        self.engine.close()

    async def retire(self) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await streams_ended(self.engine)
        finally:
            self.engine.close()

    async def _follow(self) -> None:
        incarnation: str | None = None
        while True:
            state = self.engine.state()
            is_new = state.incarnation is not None and state.incarnation != incarnation
            was_known = incarnation is not None
            incarnation = state.incarnation or incarnation
            self._on_change(self, is_new and was_known)
            await self.engine.wait_changed()

    async def _tell_if_silent(self) -> None:
        """Say what may be wrong with an engine that never answers: who is refused for its keys hears nothing at all."""
        await asyncio.sleep(SILENT_AT_FIRST_S)
        if self.engine.frames_received:
            return
        hint = "can it be reached from here?"
        if self.record.public_key is not None:
            hint = "can it be reached from here, and is this gateway's public key in its list of clients?"
        told = self.engine.state().message
        log.warning("nothing has come from %s at %s yet: %s (%s)", self.target_id, self.engine.address, hint, told)
