"""The API process and a torch-free engine process, as real processes on a private wire and a free port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from router.registry.base import RankAddress, WorkerRecord
from server.api_spec import ApiSpec
from server.config import ServeConfig

STOP_TIMEOUT_S = 20


@dataclass
class ApiProcess:
    url: str
    process: subprocess.Popen[bytes]

    def stop(self) -> int:
        """SIGTERM; return the exit code."""
        self.process.terminate()
        return self.process.wait(STOP_TIMEOUT_S)


@contextmanager
def text_core(address: str, *, step_s: float = 0.001) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", "tests.support.text_core", address, str(step_s)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def worker_at(address: str) -> WorkerRecord:
    """An engine that is reached there and tells nothing of what it caches."""
    return WorkerRecord(
        worker_id="engine", incarnation="local", model="tiny", ranks=(RankAddress(dp_rank=0, wire=address),)
    )


@contextmanager
def api_processes(
    address: str, *, count: int = 1, config: ServeConfig | None = None, metrics_dir: str | None = None
) -> Iterator[list[ApiProcess]]:
    """Start API processes on one shared listening socket."""
    processes: list[ApiProcess] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        spec = ApiSpec(
            config=config or ServeConfig(),
            listen_fd=listener.fileno(),
            workers=(worker_at(address),),
            metrics_dir=metrics_dir,
        )
        try:
            for _ in range(count):
                processes.append(ApiProcess(url, _start(spec)))  # noqa: PERF401 - each one is to be ended, also if the next fails
            yield processes
        finally:
            for one in processes:
                one.process.kill()
                one.process.wait()


def _start(spec: ApiSpec) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "server.api_process"],
        stdin=subprocess.PIPE,
        pass_fds=(spec.listen_fd,),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(spec) + b"\n")
    process.stdin.close()
    return process
