"""One DP rank of a worker: the engine core's process, and this process's own connection to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from engine.errors import EngineError
from engine.protocol import EngineLoad
from engine.wire.client import RemoteEngine
from engine.wire.curve import KeyPair
from router.registry.base import RankAddress
from server.child import ChildSpec
from server.config import WorkerConfig
from server.core_process import CoreSpec, WireSecurity
from server.local_core import LocalCore
from server.worker.addresses import RankPlaces

log = logging.getLogger(__name__)


class Rank:
    """`on_change` is called whenever the engine's state has changed."""

    def __init__(
        self,
        number: int,
        places: RankPlaces,
        config: WorkerConfig,
        keys: KeyPair | None,
        core_module: str,
        on_change: Callable[[], None],
    ) -> None:
        self.number = number
        self._places = places
        self._on_change = on_change
        self.engine = RemoteEngine(
            places.wire.local, keys=keys, server_key=None if keys is None else keys.public, watch_load=True
        )
        self.core = LocalCore(_core_child(number, places, config, core_module), self.engine, config.cores, on_change)
        self._watching: asyncio.Task[None] | None = None
        self._draining = False

    def open(self) -> None:
        """Follow the state of the core, which is opened by whoever runs it."""
        self._watching = asyncio.create_task(self._watch())

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self.core.close()

    @property
    def is_ready(self) -> bool:
        return self.core.is_ready

    @property
    def starts(self) -> int:
        """Of the core's process."""
        return self.core.child.starts

    @property
    def is_draining(self) -> bool:
        return self._draining or self.engine.state().state == "draining"

    async def drain(self) -> None:
        """Take nothing new; a core that is away now will take nothing either when it comes back."""
        self._draining = True
        if self.is_ready:
            try:
                await self.engine.drain()
            except EngineError as error:
                log.warning("engine %d was not told to drain: %s", self.number, error)

    @property
    def load(self) -> EngineLoad | None:
        """The latest report; None while the core is away."""
        return self.engine.latest_load

    @property
    def address(self) -> RankAddress:
        """What the registry tells of it."""
        return RankAddress(
            dp_rank=self.number,
            wire=self._places.wire.advertised,
            events=self._places.events.advertised,
            events_replay=self._places.events_replay.advertised,
            incarnation=self.engine.state().incarnation,
        )

    async def _watch(self) -> None:
        while True:
            self._on_change()
            if self._draining:
                await self.drain()
            await self.engine.wait_changed()


def _core_child(number: int, places: RankPlaces, config: WorkerConfig, module: str) -> ChildSpec:
    security = None
    if config.wire_key_file is not None:
        security = WireSecurity(key_file=config.wire_key_file, clients_file=config.wire_clients_file)
    spec = CoreSpec(
        config=msgspec.structs.replace(config.engine, local_index=number, local_engines=config.dp),
        address=places.wire.address,
        listen_fd=places.wire.fd,
        events_address=places.events.address,
        events_fd=places.events.fd,
        events_replay_address=places.events_replay.address,
        events_replay_fd=places.events_replay.fd,
        dp_rank=number,
        security=security,
        drain_timeout_s=config.drain_timeout_s,
        log_level=config.log_level,
        log_format=config.log_format,
    )
    name = "The engine" if config.dp == 1 else f"Engine {number}"
    return ChildSpec(name, module, msgspec.json.encode(spec) + b"\n", places.fds)
