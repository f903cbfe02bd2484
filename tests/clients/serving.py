"""`headrace serve` with the packaged model and an API key, as a process that clients know by its URL alone.

Runs in the clients' environment, where Headrace is not installed: the server has an interpreter of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.until import until

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("HEADRACE_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
START = "from server.cli.main import main; main()"
MODEL = "smollm2"
KEY = "a-key-for-the-clients-tests"
FLAGS = ("--port=0", "--dtype=float32", "--numerics=invariant", "--max-model-len=2048")
"""With these numerics a streamed answer has the tokens of a whole one whatever else runs."""

READY_LIMIT_S = 240.0
"""Fetching the packaged model, the first time on a machine, is part of it."""

ABORT_LIMIT_S = 120.0
EXIT_LIMIT_S = 60


@dataclass(frozen=True)
class Server:
    url: str

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def aborts(self) -> int:
        """Return how many choices have ended because their client left."""
        counts = self._load()["requests_total"]
        assert isinstance(counts, dict)
        return int(counts.get("abort", 0))

    async def wait_aborts(self, count: int) -> None:
        """Return when that many have been aborted in all and nothing runs any more."""

        def are_over() -> bool:
            return self.aborts() == count and not self._load()["running"]

        await until(are_over, "cancelled requests are aborted", limit_s=ABORT_LIMIT_S)

    def _load(self) -> dict[str, object]:
        with urllib.request.urlopen(f"{self.url}/load", timeout=30) as answer:
            load: dict[str, object] = json.load(answer)
        return load

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=30) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError:
            return False


@contextmanager
def serving(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start the server with its files in `directory`; yield its process and log. It must end well when asked to."""
    keys, log = directory / "keys.yaml", directory / "serve.log"
    keys.write_text(f"{KEY}: clients\n")
    keys.chmod(0o600)
    settings = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    if cache := os.environ.get("HEADRACE_CACHE_DIR"):
        settings["HEADRACE_CACHE_DIR"] = cache
    with log.open("wb") as output:
        process = subprocess.Popen(
            [PYTHON, "-c", START, "serve", MODEL, *FLAGS, f"--api-keys-file={keys}"],
            cwd=ROOT,
            env={**settings, "HEADRACE_STATE_DIR": str(directory / "state")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            yield process, log
            process.terminate()
            code = process.wait(EXIT_LIMIT_S)
        finally:
            process.kill()
            process.wait()
    text = log.read_text(errors="replace")
    assert code == 0, text
    assert "Traceback" not in text, text


async def listening(process: subprocess.Popen[bytes], log: Path) -> Server:
    """Return the server once it is ready to answer."""

    def port_is_told() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")
        return _address(log) is not None

    await until(port_is_told, "the port is printed")
    server = Server(_address(log) or "")

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")
        return server.is_ready()

    await until(is_ready, "the server is ready", limit_s=READY_LIMIT_S)
    return server


def _address(log: Path) -> str | None:
    found = re.search(r"listening on (http://\S+)", log.read_text(errors="replace"))
    return None if found is None else found[1]
