"""`headrace serve` as users run it: command line, launcher, engine with a model, API processes, a free port."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from engine.protocol import EngineLoad
from tests.support.families import exit_code_of, kill_family
from tests.support.raw_http import exchange
from tests.support.until import until

ROOT = Path(__file__).parents[2]
COMMAND = "import sys; from server.cli.main import main; main()"
COMMAND_WITH_CORE = """
import functools, sys
import server.launcher
from server.cli.main import main
server.launcher.run = functools.partial(server.launcher.run, core_module=sys.argv.pop(1))
main()
"""
CORE, API = "server.core_process", "server.api_process"
READY_TIMEOUT_S = 120
"""A model of some size takes a while on a machine that does much else."""


class HeadraceServer:
    """One running server, or a gateway to `model`. Flags are those of the command line, with underscores. Its engines
    run in `core_module`."""

    def __init__(
        self, log: Path, model: str, *, command: str = "serve", core_module: str = CORE, **flags: object
    ) -> None:
        self.model = model
        self.core_module = core_module
        self._log = log
        options = [
            f"--{name.replace('_', '-')}={one}"
            for name, value in {"port": 0, **flags}.items()
            for one in (value if isinstance(value, list) else [value])
        ]
        models = [model] if command == "serve" else []
        with log.open("wb") as stderr:
            self.process = psutil.Popen(
                [sys.executable, "-c", COMMAND_WITH_CORE, core_module, command, *models, *options],
                cwd=ROOT,
                stdout=stderr,
                stderr=stderr,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HEADRACE_STATE_DIR": str(log.parent / "state")},
            )

    @property
    def text(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    @property
    def core(self) -> psutil.Process:
        """Of the only engine."""
        (core,) = self.cores
        return core

    @property
    def cores(self) -> list[psutil.Process]:
        return self.children(self.core_module)

    @property
    def apis(self) -> list[psutil.Process]:
        return self.children(API)

    def children(self, module: str) -> list[psutil.Process]:
        return [child for child in self.process.children() if module in _command_line(child)]

    async def url(self) -> str:
        await until(lambda: "listening on" in self.text, "the port is printed")
        found = re.search(r"listening on (http://\S+)", self.text)
        assert found is not None
        return found[1]

    async def client(self) -> httpx.AsyncClient:
        """Return a client whose connections are its own. The caller closes it."""
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=await self.url(), timeout=60, limits=limits, trust_env=False)

    async def wait_ready(self) -> None:
        """Return when the port answers ready. Of several API processes another may still refuse for a moment."""

        async def is_ready() -> bool:
            assert self.process.poll() is None, self.text
            try:
                return (await self.get("/ready"))[0] == 200
            except ConnectionError:
                return False

        await until(is_ready, "the server is ready", limit_s=READY_TIMEOUT_S)

    async def get(self, path: str) -> tuple[int, str]:
        """Return status and body."""
        return await exchange(await self.url(), path)

    async def load(self) -> EngineLoad:
        status, text = await self.get("/load")
        assert status == 200, text
        return msgspec.json.decode(text, type=EngineLoad)

    async def wait_idle(self) -> EngineLoad:
        """Return the load once nothing runs or waits."""

        async def is_idle() -> bool:
            load = await self.load()
            return not (load.running or load.waiting or load.waiting_kv)

        await until(is_idle, "nothing runs any more")
        return await self.load()

    async def metrics(self) -> dict[str, float]:
        """Return the samples by name and labels, as they stand in the exposition."""
        lines = (await self.get("/metrics"))[1].splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    async def exit_code(self) -> int:
        return await exit_code_of(self.process)

    def kill(self) -> None:
        """End it and all that it has started, if they still run."""
        kill_family(self.process)


def _command_line(process: psutil.Process) -> str:
    """Return it, or nothing when the process has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def headrace(
    directory: Path, model: str | Path, *, core_module: str = CORE, **flags: object
) -> AbstractContextManager[HeadraceServer]:
    """Start a server with its log in `directory`; at the end it is killed, and must not have printed a trace."""
    return _running(directory / "serve.log", str(model), core_module=core_module, **flags)


def gateway(directory: Path, model: str | Path, **flags: object) -> AbstractContextManager[HeadraceServer]:
    """The same for a gateway, which knows `model` only from its workers."""
    return _running(directory / "gateway.log", str(model), command="gateway", **flags)


@contextmanager
def _running(log: Path, model: str, **options: Any) -> Iterator[HeadraceServer]:  # noqa: ANN401
    server = HeadraceServer(log, model, **options)
    try:
        yield server
    finally:
        server.kill()
    assert "Traceback" not in server.text, server.text
