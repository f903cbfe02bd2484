"""One supervised child process: started, restarted with back-off when it dies, stopped with a time limit.

Knows nothing of what the child does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from server.parent_watch import child_command

log = logging.getLogger(__name__)


class Backoff:
    """Pauses between starts: they double from `first_s` to `max_s` and begin anew after `healthy_s` of life."""

    def __init__(self, first_s: float = 0.1, max_s: float = 10.0, healthy_s: float = 60.0) -> None:
        self._first_s, self._max_s, self._healthy_s = first_s, max_s, healthy_s
        self._next_s = first_s

    def pause_s(self, lived_s: float) -> float:
        """Return how long to wait after a life of `lived_s`."""
        if lived_s >= self._healthy_s:
            self._next_s = self._first_s
        pause_s = self._next_s
        self._next_s = min(self._max_s, pause_s * 2)
        return pause_s


@dataclass(frozen=True)
class ChildSpec:
    """`stdin_line` is written to the child's stdin, which is then closed; `fds` are inherited under their numbers."""

    name: str
    module: str
    stdin_line: bytes
    fds: tuple[int, ...] = ()


class Child:
    """At any moment at most one process runs for a child. It is in a process group of its own, so that Ctrl-C reaches
    the launcher alone, and dies with the launcher."""

    def __init__(self, spec: ChildSpec, *, final_codes: Collection[int] = ()) -> None:
        self.spec = spec
        self.starts = 0
        self._final_codes = final_codes
        self._backoff = Backoff()
        self._stopping = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    async def keep_running(self) -> int:
        """Return the exit code once it is final or follows a `stop()`; restart after any other."""
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            code = await self._run_once()
            if self._stopping.is_set() or code in self._final_codes:
                return code
            pause_s = self._backoff.pause_s(loop.time() - started_s)
            log.warning("%s ended with %s; starting it again in %.1f s", self.spec.name, _describe(code), pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
                return code

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return None if self._process is None else self._process.pid

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Signal the process and start no other. `keep_running` returns when it has gone."""
        self._stopping.set()
        self._signal(signum)

    def kill(self) -> None:
        """End the process at once; another is started in its place, unless it was stopped."""
        self._signal(signal.SIGKILL)

    def _signal(self, signum: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    async def _run_once(self) -> int:
        self.starts += 1
        process = await asyncio.create_subprocess_exec(
            *child_command(self.spec.module),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=self.spec.fds,
            process_group=0,
        )
        self._process = process
        try:
            if self._stopping.is_set():
                process.kill()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await process.communicate(self.spec.stdin_line)
            return await process.wait()
        finally:
            self._process = None


async def stop_children(children: Sequence[Child], tasks: Sequence[asyncio.Task[int]], grace_s: float) -> None:
    """Let them end on SIGTERM for `grace_s`, then kill."""
    for child in children:
        child.stop()
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=grace_s)
    for child, task in zip(children, tasks, strict=True):
        if task in late:
            log.warning("%s has not ended within %g s and is killed", child.spec.name, grace_s)
            child.stop(signal.SIGKILL)
    await asyncio.wait(tasks)


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
