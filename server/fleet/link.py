"""The connection to one rank of one worker, and what has been learnt over it. One link lives as long as its address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from engine.protocol import EngineInfo
from engine.wire.client import RemoteEngine
from engine.wire.curve import KeyPair
from router.registry.base import RankAddress, WorkerRecord

RETIRE_POLL_S = 0.2
RETIRE_SILENT_LOOKS = 150
"""In a row: 30 s, which is longer than steps take."""


def target_id(worker_id: str, dp_rank: int) -> str:
    return f"{worker_id}/{dp_rank}"


class RankLink:
    """A `Target`. `on_change(link, is_new_process)` is called whenever the engine's state changes, and at first."""

    def __init__(
        self,
        record: WorkerRecord,
        rank: RankAddress,
        keys: KeyPair | None,
        on_change: Callable[[RankLink, bool], None],
    ) -> None:
        self.record = record
        self.rank = rank
        self.target_id = target_id(record.worker_id, rank.dp_rank)
        secured = keys if record.public_key is not None else None
        self.engine = RemoteEngine(rank.wire, keys=secured, server_key=record.public_key, watch_load=True)
        self._on_change = on_change
        self._watch: asyncio.Task[None] | None = None

    def leads_to(self, record: WorkerRecord, rank: RankAddress) -> bool:
        """Whether it is the connection that a record asks for. Which process answers there is learnt over it."""
        same_process = msgspec.structs.replace(rank, incarnation=self.rank.incarnation)
        return (same_process, record.public_key, record.model) == (self.rank, self.record.public_key, self.record.model)

    @property
    def info(self) -> EngineInfo | None:
        """What the engine has said of itself, while it can be reached."""
        return self.engine.state().info

    def open(self) -> None:
        self.engine.open()
        self._watch = asyncio.create_task(self._follow())

    def close(self) -> None:
        """Its streams end with EngineDiedError."""
        if self._watch is not None:
            self._watch.cancel()
        self.engine.close()

    async def retire(self) -> None:
        """Close once its streams have ended: being on no list is no reason to break them. Nobody watches it any more:
        when it is silent for too long they go on elsewhere."""
        if self._watch is not None:
            self._watch.cancel()
        try:
            frames, silent_looks = 0, 0
            while self.engine.num_running and self.engine.state().state in ("ready", "draining"):
                silent_looks = silent_looks + 1 if frames == self.engine.frames_received else 0
                if silent_looks > RETIRE_SILENT_LOOKS:
                    break
                frames = self.engine.frames_received
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETIRE_POLL_S):
                        await self.engine.wait_changed()
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
