"""What `headrace serve` runs: engine processes and API processes behind one listening socket.

Owns the socket, the private directory of the wire's addresses, and the children's lives. Knows neither HTTP nor models.
The port opens at once; API processes answer 503 on it while the model loads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tempfile
import uuid
from collections.abc import Sequence

import msgspec

from engine.errors import ConfigError
from engine.wire.client import RemoteEngine
from router.registry.base import GatewayRecord, RankAddress, WorkerRecord
from server.access.credentials import Credentials
from server.access.usage_table import table_bytes
from server.api_spec import ApiSpec
from server.card import facts, print_card
from server.child import Child, ChildSpec
from server.config import GatewayConfig, ServeConfig
from server.core_process import CoreSpec
from server.fleet.discovery import discovery_of
from server.lifecycle import Lifecycle
from server.loading_bar import show_loading
from server.local_core import LocalCore
from server.logs import configure
from server.ready_probe import wait_answering

log = logging.getLogger(__name__)

LISTEN_BACKLOG = 2048

MAX_SOCKET_PATH_BYTES = 100
"""The kernel's limit is 107 on Linux and 103 on macOS."""


def run(
    config: ServeConfig,
    credentials: Credentials | None = None,
    *,
    core_module: str = "server.core_process",
    api_module: str = "server.api_process",
) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code. Without `credentials` no keys are asked for.

    Raises ConfigError when the port cannot be had and ModelError when the model cannot be loaded.
    """
    configure(config.log_level, config.log_format)
    discovery = discovery_of(config, uuid.uuid4().hex) if isinstance(config, GatewayConfig) else None
    with listen(config.host, config.port) as listener, _private_directory() as directory:
        url = url_of(listener)
        log.info("listening on %s", url)
        workers = [_worker(config, index, directory) for index in range(config.replicas)]
        cores = [_core_child(config, index, core_module, worker) for index, worker in enumerate(workers)]
        common = ApiSpec(
            config=config,
            listen_fd=listener.fileno(),
            workers=tuple(workers),
            gateways=tuple(_gateway(index, directory) for index in range(config.api_processes)),
            discovery=discovery,
            credentials=credentials or Credentials(),
            metrics_dir=_metrics_dir(config, directory),
            usage_file=_usage_file(config, directory),
        )
        apis = _api_children(common, api_module)
        with_key = bool(credentials and credentials.keys) or config.api_keys_file is not None
        addresses = [worker.ranks[0].wire for worker in workers]
        return asyncio.run(Launcher(cores, apis, addresses, url, config, with_key=with_key).run())


def _worker(config: ServeConfig, index: int, directory: str) -> WorkerRecord:
    """Return how the API processes know an engine. A single one need not tell what it caches: there is no choice."""
    base = f"ipc://{directory}/engine{index}"
    rank = RankAddress(dp_rank=0, wire=base)
    if config.replicas > 1:
        rank = RankAddress(dp_rank=0, wire=base, events=f"{base}-events", events_replay=f"{base}-replay")
    model = config.engine.served_model_name or config.engine.model
    return WorkerRecord(worker_id=f"engine{index}", incarnation="local", model=model, ranks=(rank,))


def _core_child(config: ServeConfig, index: int, module: str, worker: WorkerRecord) -> ChildSpec:
    (rank,) = worker.ranks
    spec = CoreSpec(
        config=msgspec.structs.replace(config.engine, local_index=index, local_engines=config.replicas),
        address=rank.wire,
        events_address=rank.events,
        events_replay_address=rank.events_replay,
        drain_timeout_s=config.drain_timeout_s,
        log_level=config.log_level,
        log_format=config.log_format,
    )
    return ChildSpec("The engine" if config.replicas == 1 else f"Engine {index}", module, _line(spec))


def _metrics_dir(config: ServeConfig, directory: str) -> str | None:
    """Make the directory by which several API processes share their counters; one alone needs none."""
    if config.api_processes == 1:
        return None
    os.mkdir(f"{directory}/metrics")
    return f"{directory}/metrics"


def _usage_file(config: ServeConfig, directory: str) -> str | None:
    """Make the file by which several API processes count together what API keys use; one alone needs none."""
    if config.api_processes == 1:
        return None
    path = f"{directory}/usage"
    with open(path, "xb") as file:
        file.truncate(table_bytes(config.api_processes))
    return path


def _api_children(common: ApiSpec, module: str) -> list[ChildSpec]:
    return [
        ChildSpec(
            f"API process {index}", module, _line(msgspec.structs.replace(common, index=index)), (common.listen_fd,)
        )
        for index in range(common.config.api_processes)
    ]


def _gateway(index: int, directory: str) -> GatewayRecord:
    return GatewayRecord(gateway_id=f"api{index}", incarnation="local", dispatches=f"ipc://{directory}/api{index}")


class Launcher:
    """The processes of one server, and what it says of them. Lives for one `run()`."""

    def __init__(
        self,
        cores: Sequence[ChildSpec],
        apis: Sequence[ChildSpec],
        addresses: Sequence[str],
        url: str,
        config: ServeConfig,
        *,
        with_key: bool,
    ) -> None:
        self._cores = [
            LocalCore(spec, RemoteEngine(address, watch_load=True), config.cores)
            for spec, address in zip(cores, addresses, strict=True)
        ]
        self._life = Lifecycle(self._cores, [Child(api) for api in apis], config.drain_timeout_s)
        self._url = url
        self._with_key = with_key
        self._log_format = config.log_format

    async def run(self) -> int:
        """Return the exit code. Raises ModelError when the model cannot be loaded."""
        announcing = asyncio.create_task(self._announce())
        try:
            return await self._life.run()
        finally:
            announcing.cancel()
            for core in self._cores:
                core.close()

    async def _announce(self) -> None:
        if not self._cores:
            await wait_answering(self._url)
            log.info("the gateway is ready at %s", self._url)
            return
        # They load the same model at the same time: one bar is enough.
        await show_loading(self._cores[0].engine)
        infos = [await core.engine.wait_ready() for core in self._cores]
        info = infos[0]
        await wait_answering(self._url)
        if self._log_format == "json":  # Who parses the log finds one object on every line.
            log.info("%s is ready at %s", info.model, self._url, extra=facts(info, replicas=len(infos)))
            return
        log.info("%s is ready at %s", info.model, self._url)
        print_card(info, self._url, with_key=self._with_key, replicas=len(infos))


def listen(host: str, port: int) -> socket.socket:
    """Bind and listen; port 0 takes any free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, ValueError) as error:  # the second for what is no name at all
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"Cannot listen on host {host[:200]!r}: {reason}.", hint="Try --host 127.0.0.1.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Cannot listen on {host} port {port}: {error.strerror}.", hint="Choose another with --port, or 0 for any."
        ) from error
    return listener


def url_of(listener: socket.socket, *, advertise: str | None = None) -> str:
    """Return the URL by which this machine reaches it, or by which others do when it listens on all addresses."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = advertise or "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _private_directory() -> tempfile.TemporaryDirectory[str]:
    """Where the wire's socket lives: only this user can enter it, and its path is short enough for a socket."""
    prefix = "headrace-"
    is_long = len(tempfile.gettempdir().encode()) + len(f"/{prefix}12345678/engine") > MAX_SOCKET_PATH_BYTES
    return tempfile.TemporaryDirectory(prefix=prefix, dir="/tmp" if is_long else None)


def _line(spec: msgspec.Struct) -> bytes:
    return msgspec.json.encode(spec) + b"\n"
