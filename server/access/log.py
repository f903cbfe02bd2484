"""The access log: one JSON object for every request that is no probe. It has no text of prompts or answers, no keys and
no salts, and of the URL only the route.

A thread of its own writes, so that a slow disk or a stopped reader costs lines and never time: lines that do not fit
the queue are dropped and counted. A file is opened for appending, by every API process, and opened anew when it was
moved away; each write is whole lines.
"""

from __future__ import annotations

import logging
import os
import queue
import stat
import threading
import time

import msgspec

from engine.errors import ConfigError
from server.access.record import RequestRecord

logger = logging.getLogger(__name__)

STDOUT = "-"
MAX_QUEUED_LINES = 10_000
MAX_BATCH_LINES = 256
CLOSE_TIMEOUT_S = 2.0


def check_writable(path: str) -> None:
    """Raise ConfigError unless lines can be appended to `path`."""
    if path == STDOUT:
        return
    try:
        os.close(_open(path))
    except OSError as error:
        raise ConfigError(f"The access log {path} cannot be written: {error.strerror or error}.") from None


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


class AccessLog:
    """Owns the descriptor and the thread; `close` writes what is queued. `dropped` counts lines that were lost."""

    def __init__(self, path: str) -> None:
        self.dropped = 0
        self._path = path
        self._descriptor = os.dup(1) if path == STDOUT else _open(path)
        self._queue: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED_LINES)
        self._thread = threading.Thread(target=self._write_all, name="access-log", daemon=True)
        self._thread.start()

    def write(self, record: RequestRecord, *, method: str, route: str, status: int, duration_s: float) -> None:
        try:
            self._queue.put_nowait(_line(record, method, route, status, duration_s))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        try:
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
            self._thread.join(CLOSE_TIMEOUT_S)
        except queue.Full:
            pass  # nobody reads: the thread is a daemon and ends with the process
        if self.dropped:
            logger.warning("%d lines of the access log were dropped", self.dropped)

    def _write_all(self) -> None:
        is_open = True
        while is_open:
            lines = [self._queue.get()]
            while len(lines) < MAX_BATCH_LINES and not self._queue.empty():
                lines.append(self._queue.get_nowait())
            is_open = None not in lines
            try:
                self._follow_the_path()
                self._write(b"".join(line for line in lines if line is not None))
            except OSError as error:
                self.dropped += sum(line is not None for line in lines)
                logger.error("the access log %s cannot be written: %s", self._path, error.strerror or error)
        os.close(self._descriptor)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _follow_the_path(self) -> None:
        """Open the path again when it no longer names our file: log rotation moves it away."""
        if self._path == STDOUT:
            return
        ours = os.fstat(self._descriptor)
        if not stat.S_ISREG(ours.st_mode):
            return
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_ino, there.st_dev) != (ours.st_ino, ours.st_dev):
            fresh = _open(self._path)
            os.close(self._descriptor)
            self._descriptor = fresh


def _line(record: RequestRecord, method: str, route: str, status: int, duration_s: float) -> bytes:
    now = time.time()
    event: dict[str, object] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z",
        "request_id": record.request_id,
        "tenant": record.tenant,
        "method": method,
        "route": route,
        "status": status,
        "duration_s": round(duration_s, 6),
    }
    if record.trace is not None:
        event["trace_id"] = record.trace.trace_id
    if record.error is not None:
        event["error"] = record.error
    if record.answer_id is not None:
        event |= {
            "id": record.answer_id,
            "model": record.model,
            "stream": record.stream,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "cached_tokens": record.cached_tokens,
            "ttft_s": None if record.ttft_s is None else round(record.ttft_s, 6),
            "finish_reasons": record.finish_reasons,
        }
    return msgspec.json.encode(event) + b"\n"
