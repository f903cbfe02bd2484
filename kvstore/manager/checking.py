"""Checks of objects in memory by processes that map it.

In threads most of the time of many checks goes into taking the interpreter back behind every hash, and the engine's
loop pays for it too. Processes have an interpreter each. They are an accelerator: without them, before they have
started and after they have died, whoever asks checks by itself.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from kvstore.layout import ObjectLayout
from kvstore.manager.check_process import COUNT, MAX_OBJECTS, OBJECT, READY
from kvstore.object_key import ObjectKey
from kvstore.quick_check import key_bytes

log = logging.getLogger(__name__)

REGION_BYTES = 8 << 20
"""Neighbours in the arena go to the same process: each has to map what it reads."""

END_S = 5.0


@dataclass(slots=True, eq=False)
class _Process:
    process: subprocess.Popen[bytes]
    link: socket.socket
    is_ready: bool = False
    asked: deque[Future[int]] = field(default_factory=deque)


class CheckProcesses:
    """`count` processes over the arena with descriptor `arena_fd`, for objects of `layouts`. They start in the
    background. To be closed once nothing is asked any more."""

    def __init__(self, arena_fd: int, layouts: Sequence[ObjectLayout], count: int) -> None:
        self._arena_fd, self._layouts, self._count = arena_fd, list(layouts), count
        self._lock = threading.Lock()
        self._processes: list[_Process] = []
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="kv-checked", daemon=True)
        self._thread.start()

    def ask(self, objects: Sequence[tuple[int, int, ObjectKey]]) -> Future[int] | None:
        """Return how many objects are right before the first that is not, or that was not checked because a process
        died; each is the number of its layout, its place in the arena and its key. None: no process is there to ask.

        A process maps what it reads for the first time page by page, which takes longer than the check: ask about
        objects once when they are new, and it is done with before anybody waits.
        """
        if not 0 < len(objects) <= MAX_OBJECTS:
            return None
        message = b"".join(OBJECT.pack(offset, number, key_bytes(key)) for number, offset, key in objects)
        future: Future[int] = Future()
        with self._lock:
            ready = [one for one in self._processes if one.is_ready]
            if not ready:
                return None
            one = ready[objects[0][1] // REGION_BYTES % len(ready)]
            try:
                one.link.send(message, socket.MSG_DONTWAIT)
            except OSError:  # it has more than enough to do, or has died
                return None
            one.asked.append(future)
        return future

    def kill(self) -> None:
        """Give up processes that do not answer: what they were asked ends unchecked."""
        with self._lock:
            for one in self._processes:
                one.process.kill()

    def close(self) -> None:
        with self._lock:
            self._closing = True
            for one in self._processes:
                with contextlib.suppress(OSError):
                    one.link.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._start()
            while self._processes:
                for key, _ in self._selector.select():
                    self._hear(key.data)
        except Exception:
            log.exception("objects are checked without processes")
        for one in list(self._processes):
            self._end(one)
        self._selector.close()

    def _start(self) -> None:
        layouts = msgspec.msgpack.encode(self._layouts)
        for _ in range(self._count):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = [sys.executable, "-m", __name__.replace("checking", "check_process")]
                fds = (self._arena_fd, theirs.fileno())
                process = subprocess.Popen([*command, *map(str, fds)], pass_fds=fds, stdin=subprocess.DEVNULL)
            one = _Process(process, ours)
            ours.send(layouts)
            with self._lock:
                self._processes.append(one)
                if self._closing:
                    ours.shutdown(socket.SHUT_RDWR)
            self._selector.register(ours, selectors.EVENT_READ, one)

    def _hear(self, one: _Process) -> None:
        try:
            answer = one.link.recv(len(READY))
        except OSError:
            answer = b""
        if not answer:
            self._end(one)
            return
        with self._lock:
            done = one.asked.popleft() if one.is_ready else None
            one.is_ready = True
        if done is not None:
            done.set_result(COUNT.unpack(answer)[0])

    def _end(self, one: _Process) -> None:
        """A process has died, or is to end."""
        with self._lock:
            self._processes.remove(one)
            if not self._closing:
                log.warning("a process that checks stored KV has ended")
        self._selector.unregister(one.link)
        one.link.close()
        try:
            one.process.wait(END_S)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
        for future in one.asked:
            future.set_result(0)
