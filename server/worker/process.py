"""What `headrace worker` runs: N engine cores on the wire, their record in a registry, and a small HTTP port.

Owns the ports, the cores' lives and the worker's state. A core that dies is started again with back-off on the same
port. SIGTERM drains: the record says so, cores take nothing new, running requests get their time, exit code 0.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Sequence
from contextlib import ExitStack

from engine.protocol import EngineInfo
from engine.wire.curve import KeyPair
from router.registry.base import Announcement, Registry, WorkerRecord
from router.registry.open import open_registry
from server.config import WorkerConfig
from server.health import ServiceState
from server.launcher import listen, url_of
from server.lifecycle import Lifecycle
from server.logs import configure
from server.wire_access import check_not_open, read_wire_keys
from server.worker.addresses import RankPlaces, open_places
from server.worker.http import Server, build_app
from server.worker.rank import Rank
from server.worker.record import default_worker_id, make_record, state_of

log = logging.getLogger(__name__)

FAREWELL_S = 2.0
"""How long a registry that cannot be reached may hold up the end."""


def run(config: WorkerConfig, admin_digests: Sequence[str] = (), *, core_module: str = "server.core_process") -> int:
    """Serve until SIGTERM or SIGINT; return the exit code.

    Raises ConfigError for settings that cannot be used, and ModelError when the model cannot be loaded.
    """
    configure(config.log_level, config.log_format)
    keys = check_security(config)
    with ExitStack() as sockets:
        places = open_places(config.listen, config.events_listen, config.dp, config.advertise, sockets)
        listener = sockets.enter_context(listen(config.http_host, config.http_port))
        http_url = url_of(listener, advertise=config.advertise or socket.gethostname())
        worker_id = config.worker_id or default_worker_id(places[0].wire.advertised)

        async def main() -> int:
            registry = None if config.register is None else open_registry(config.register)
            worker = Worker(config, worker_id, places, http_url, keys, registry, core_module)
            server = Server(build_app(worker, admin_digests))
            serving = asyncio.create_task(server.serve([listener]))
            log.info("worker %s: wire %s, http %s", worker_id, places[0].wire.advertised, http_url)
            try:
                return await worker.run()
            finally:
                server.should_exit = True
                await serving

        return asyncio.run(main())


def check_security(config: WorkerConfig) -> KeyPair | None:
    """Return the worker's keys. Raises ConfigError for files that cannot be used, and for an open door."""
    keys = read_wire_keys(config.wire_key_file, config.wire_clients_file)
    if keys is None and not config.insecure:
        for address in filter(None, (config.listen, config.events_listen)):
            check_not_open(
                address,
                "Give --wire-key-file and --wire-clients-file (`headrace keys pair FILE`), or --insecure.",
            )
    return keys


class Worker:
    """The ranks of one worker, from their start to their end. Lives for one `run()`."""

    def __init__(
        self,
        config: WorkerConfig,
        worker_id: str,
        places: Sequence[RankPlaces],
        http_url: str,
        keys: KeyPair | None,
        registry: Registry | None,
        core_module: str,
    ) -> None:
        self._config = config
        self._worker_id = worker_id
        self._incarnation = uuid.uuid4().hex
        self._http_url = http_url
        self._public_key = None if keys is None else keys.public
        self._registry = registry
        self._changed = asyncio.Event()
        self._info: EngineInfo | None = None
        self.ranks = [
            Rank(number, place, config, keys, core_module, self._changed.set) for number, place in enumerate(places)
        ]
        # The cores drain themselves: each ends when nothing runs there any more, or when its time is over.
        self.life = Lifecycle([rank.core for rank in self.ranks], (), config.drain_timeout_s, self._changed.set)

    async def run(self) -> int:
        """Return the exit code. Raises ModelError when the model cannot be loaded."""
        for rank in self.ranks:
            rank.open()
        announcing = asyncio.create_task(self._announce())
        announcing.add_done_callback(_tell_failure)
        try:
            return await self.life.run()
        finally:
            await self._withdraw(announcing)
            for rank in self.ranks:
                rank.close()

    # --- what others see ----------------------------------------------------------------------------------------------

    @property
    def record(self) -> WorkerRecord:
        self._info = next((info for rank in self.ranks if (info := rank.engine.state().info)), self._info)
        state = state_of(
            [rank.is_ready for rank in self.ranks],
            [rank.is_draining for rank in self.ranks],
            is_stopping=self.life.is_stopping,
        )
        return make_record(
            self._config,
            self._worker_id,
            self._incarnation,
            state,
            [rank.address for rank in self.ranks],
            info=self._info,
            http_url=self._http_url,
            public_key=self._public_key,
        )

    def service_state(self) -> ServiceState:
        match self.record.state:
            case "ready":
                return ServiceState("ready")
            case "draining":
                return ServiceState("draining")
        progress = max(rank.engine.state().progress for rank in self.ranks)
        return ServiceState("loading" if self._info is None else "restarting", progress=progress)

    async def drain(self) -> None:
        """Take nothing new, and go on running what runs. There is no way back but a restart."""
        for rank in self.ranks:
            await rank.drain()
        self._changed.set()

    # --- the registry -------------------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        announced: WorkerRecord | None = None
        announcement: Announcement | None = None
        try:
            while True:
                self._changed.clear()
                record = self.record
                if record != announced:
                    self._tell(announced, record)
                    announced = record
                    if announcement is not None:
                        await announcement.update(record)
                    elif self._registry is not None:
                        announcement = await self._registry.announce(record)
                await self._changed.wait()
        finally:
            if announcement is not None:
                await announcement.close()

    def _tell(self, before: WorkerRecord | None, record: WorkerRecord) -> None:
        if before is None or before.state != record.state:
            log.info("worker %s is %s", record.worker_id, record.state)

    async def _withdraw(self, announcing: asyncio.Task[None]) -> None:
        """Take the record back, if its registry can be reached."""
        announcing.cancel()
        try:
            async with asyncio.timeout(FAREWELL_S):
                await asyncio.wait({announcing})
                if self._registry is not None:
                    await self._registry.close()
        except TimeoutError:
            log.warning("the registry does not answer: the record of this worker runs out by itself")


def _tell_failure(announcing: asyncio.Task[None]) -> None:
    if not announcing.cancelled() and (error := announcing.exception()) is not None:
        log.error("this worker is announced no longer: %r", error)
