"""One API process: the HTTP application on an inherited socket, in front of an engine core in another process.

`python -m server.api_process` reads its `ApiSpec` as one line of JSON on stdin. SIGTERM drains: new requests are
refused, running ones get `drain_timeout_s`, exit code 0. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvicorn
from fastapi import FastAPI

from engine.errors import ConfigError
from server import logs
from server.access.usage_table import UsageTable
from server.api_spec import ApiSpec
from server.config import ServeConfig
from server.connection import Connection, raise_fd_limit
from server.fleet.footing import Footing, footing_of

if TYPE_CHECKING:
    from server.fleet.fleet import Fleet

log = logging.getLogger("server.api_process")

YOUNG_OBJECTS = 20_000
"""That are made and not freed before the garbage collector looks for cycles: those of some tens of requests."""

CLOSE_TIMEOUT_S = 2
"""For connections that do not close although nothing runs on them."""


class DrainingServer(uvicorn.Server):
    """uvicorn closes its sockets at the first signal; this one goes on answering until the drain is over."""

    def __init__(self, app: FastAPI, config: ServeConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                loop="uvloop",
                ws="none",
                proxy_headers=False,  # whoever connects is whom the guard judges, whatever they say of themselves
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=max(1, round(config.keep_alive_s)),
                timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
            )
        )
        self._traffic = app.state.service.traffic
        self._drain_timeout_s = config.drain_timeout_s
        self._drain: asyncio.Task[None] | None = None

    def begin_drain(self) -> None:
        """What a signal does. Safe to call again: that ends the server at once."""
        if self._drain is not None:
            self.should_exit = self.force_exit = True
        else:
            self._drain = asyncio.create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        await self._traffic.drain(self._drain_timeout_s)
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self.begin_drain)
        try:
            yield
        finally:
            for signal_number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(signal_number)


async def serve(spec: ApiSpec) -> None:
    # Imported late: prometheus_client decides at import whether its counters are shared between processes.
    from server.app import build_app
    from server.fleet.router_metrics import RouterMetrics
    from server.fleet.routes import fleet_routes, gateway_route

    footing = footing_of(spec)
    usage = _usage(spec)
    async with _fleet(spec, footing) as fleet:
        app = build_app(fleet, config=spec.config, credentials=spec.credentials, usage=usage)
        app.include_router(fleet_routes(fleet))
        if footing.own is not None:
            app.include_router(gateway_route(footing.own))
        metrics = RouterMetrics(app.state.service.metrics.registry, fleet.pools)
        background = [
            asyncio.create_task(_freeze_once_open(fleet)),
            asyncio.create_task(metrics.keep_updated()),
        ]
        try:
            with socket.socket(fileno=spec.listen_fd) as listener:
                await DrainingServer(app, spec.config).serve([listener])
        finally:
            for task in background:
                task.cancel()


def _usage(spec: ApiSpec) -> UsageTable:
    """What API keys use, counted with the other API processes. It lives as long as the process: its last streams end
    after everything else."""
    if spec.usage_file is None:
        return UsageTable()
    return UsageTable(path=Path(spec.usage_file), processes=spec.config.api_processes, index=spec.index)


@asynccontextmanager
async def _fleet(spec: ApiSpec, footing: Footing) -> AsyncGenerator[Fleet, None]:
    """The engines behind this process. The application starts and closes the fleet; here is what it stands on."""
    from server.fleet.fleet import Fleet

    try:
        await footing.open()
        yield Fleet(
            footing.registry,
            msgspec.structs.replace(spec.config.routing, max_queued=spec.config.share(spec.config.routing.max_queued)),
            keys=footing.keys,
            insecure=footing.insecure,
            sharing=footing.sharing,
            gateways=footing.gateways,
            with_events=footing.with_events,
            foreign=footing.foreign,
            unready_after_s=spec.config.cores.unready_after_s if spec.discovery is None else None,
        )
    finally:
        await footing.close()


async def _freeze_once_open(fleet: Fleet) -> None:
    """Spare the garbage collector what lives as long as the process: walking through the libraries' objects again and
    again would take a tenth of a second from every stream each time. What requests leave behind is hardly ever a cycle:
    looking for one as often as Python does by itself takes a tenth of the CPU time of a request."""
    await fleet.opened.wait()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)


def forget_dead_processes(directory: Path) -> None:
    """Drop what processes that are gone have left of values that only live ones have, such as queues. The launcher
    replaces each that dies, so the next one to start does it."""
    for path in directory.glob("gauge_live*.db"):
        pid = path.stem.rpartition("_")[2]
        if pid.isdecimal() and not _is_alive(int(pid)):
            path.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def main() -> None:
    spec = msgspec.json.decode(sys.stdin.readline(), type=ApiSpec)
    logs.configure(spec.config.log_level, spec.config.log_format)
    raise_fd_limit()
    if spec.metrics_dir is not None:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = spec.metrics_dir
        forget_dead_processes(Path(spec.metrics_dir))
    with asyncio.Runner(loop_factory=uvicorn.Config("", loop="uvloop", log_config=None).get_loop_factory()) as runner:
        try:
            runner.run(serve(spec))
        except ConfigError as error:
            # The launcher starts it again: an address may become free, a file may come back.
            log.error("%s", error)
            sys.exit(1)


if __name__ == "__main__":
    main()
