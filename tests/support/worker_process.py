"""`headrace worker` as a real process, and what it tells of itself."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec
import psutil

from engine.wire.client import RemoteEngine
from engine.wire.curve import KeyPair
from router.registry.base import WorkerRecord
from server.config import WorkerConfig
from tests.support.families import exit_code_of, kill_family
from tests.support.headrace_server import COMMAND
from tests.support.raw_http import exchange
from tests.support.until import until

ROOT = Path(__file__).parents[2]
SCRIPTED = "tests.support.scripted_engine"
SCRIPTED_WORKER = (
    "import sys, msgspec\n"
    "from engine.errors import HeadraceError\n"
    "from server.config import WorkerConfig\n"
    "from server.worker.process import run\n"
    "try:\n"
    "    sys.exit(run(msgspec.json.decode(sys.argv[1], type=WorkerConfig), core_module=sys.argv[2]))\n"
    "except HeadraceError as error:\n"
    "    sys.exit(f'failed: {error}')\n"
)
LOAD_TIMEOUT_S = 180


class WorkerProcess:
    def __init__(self, log: Path, code: str, *arguments: str) -> None:
        self._log = log
        with log.open("wb") as stderr:
            self.process = psutil.Popen(
                [sys.executable, "-c", code, *arguments], cwd=ROOT, stderr=stderr, stdout=subprocess.DEVNULL
            )

    @property
    def text(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    async def url(self) -> str:
        await until(lambda: ", http http" in self.text, "the port is printed", limit_s=LOAD_TIMEOUT_S)
        found = re.search(r", http (http://\S+)", self.text)
        assert found is not None
        return found[1]

    async def get(self, path: str) -> tuple[int, str]:
        return await exchange(await self.url(), path)

    async def post(self, path: str) -> tuple[int, str]:
        return await exchange(await self.url(), path, {})

    async def record(self) -> WorkerRecord:
        status, text = await self.get("/worker")
        assert status == 200, text
        return msgspec.json.decode(text, type=WorkerRecord)

    async def ready_ranks(self, count: int) -> WorkerRecord:
        """Return the record once so many ranks can serve."""

        async def are_ready() -> bool:
            assert self.process.poll() is None, self.text
            samples = (await self.get("/metrics"))[1].splitlines()
            return sum(line.startswith("headrace_worker_ready{") and line.endswith(" 1.0") for line in samples) == count

        await until(are_ready, f"{count} ranks are ready", limit_s=LOAD_TIMEOUT_S)
        return await self.record()

    @property
    def cores(self) -> list[psutil.Process]:
        """In no order."""
        return list(self.process.children())

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def exit_code(self) -> int:
        return await exit_code_of(self.process)

    def kill(self) -> None:
        """End it and its cores, if they still run."""
        kill_family(self.process)


def worker_process(
    directory: Path, config: WorkerConfig, *, core_module: str = SCRIPTED
) -> AbstractContextManager[WorkerProcess]:
    """A worker with stand-ins as engines."""
    return _running(directory, SCRIPTED_WORKER, msgspec.json.encode(config).decode(), core_module)


def worker_command(directory: Path, model: str, **flags: object) -> AbstractContextManager[WorkerProcess]:
    """A worker as the command line starts it. Flags have underscores."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    return _running(directory, COMMAND, "worker", model, *options)


@contextmanager
def _running(directory: Path, *command: str) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(directory / "worker.log", *command)
    try:
        yield worker
    finally:
        worker.kill()
    assert "Traceback" not in worker.text, worker.text


@contextmanager
def connections(record: WorkerRecord, keys: KeyPair | None = None) -> Iterator[list[RemoteEngine]]:
    """Engines for the ranks of a record, as a gateway has them."""
    engines = [
        RemoteEngine(rank.wire, keys=keys, server_key=record.public_key if keys else None, watch_load=True)
        for rank in record.ranks
    ]
    for engine in engines:
        engine.open()
    try:
        yield engines
    finally:
        for engine in engines:
            engine.close()
