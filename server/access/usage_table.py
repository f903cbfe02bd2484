"""How much each API key has used: two buckets a key, in memory that the API processes of one server share.

A bucket drains at its limit a minute and holds one limit: what was used adds to it, what does not fit is refused.
Tokens that a running request may still use are held beside what is used, each process's for itself, and do not drain.
There is a fixed number of rows; a new key takes the least recently used of its neighbourhood.

Processes of one machine have one monotonic clock. A row changes under a lock of the file, which takes microseconds.
Knows neither HTTP nor key files.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

MINUTE_S = 60.0
KEY_BYTES = 16
ROWS = 16_384
"""Twice the keys that a file and the environment may have together."""

NEIGHBOURS = 32
"""Rows in which a key may stand."""

LOCK_TRIES, QUICK_TRIES, LOCK_PAUSE_S = 200, 10, 0.0005
"""A process that is stopped while it has the lock must not stop the others: after these they go on without it, and
what is used at that moment may be counted wrong."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one key, each a minute; None is no limit."""

    requests: int | None = None
    tokens: int | None = None


class Used(NamedTuple):
    """What is in the buckets now; `tokens` with those that are held."""

    requests: float
    tokens: float


class _Row(NamedTuple):
    updated_s: float
    requests: float
    tokens: float


_HEAD = struct.Struct(f"<{KEY_BYTES}s3d")
_COUNT = struct.Struct("<d")


def table_bytes(processes: int) -> int:
    """Return the size of the file that so many processes share."""
    return ROWS * (_HEAD.size + processes * _COUNT.size)


class UsageTable:
    """Close it at the end. `path` names a file of `table_bytes(processes)` zeros, which all of them open, this one as
    number `index`; without it the table is this process's own. Keys have `KEY_BYTES` bytes, not all zero."""

    def __init__(
        self,
        *,
        path: Path | None = None,
        processes: int = 1,
        index: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._fd = None if path is None else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._rows = mmap.mmap(-1 if self._fd is None else self._fd, table_bytes(processes))
        self._stride = table_bytes(processes) // ROWS
        self._held = struct.Struct(f"<{processes}d")
        self._own = _HEAD.size + index * _COUNT.size
        self._tries = LOCK_TRIES
        self._places: dict[bytes, int] = {}  # where keys stood when they were last looked for
        self._forget_held()

    def close(self) -> None:
        self._rows.close()
        if self._fd is not None:
            os.close(self._fd)

    def used(self, key: bytes, limits: Limits) -> Used:
        with self._locked():
            at = self._find(key)
            row = self._read(at, limits)
            return Used(row.requests, row.tokens + self._held_in_all(at))

    def take_request(self, key: bytes, limits: Limits) -> float:
        """Count one request and return 0; where it does not fit, return in how many seconds it will."""
        if limits.requests is None:
            return 0.0
        with self._locked():
            at = self._find(key)
            row = self._read(at, limits)
            wait_s = _wait_s(row.requests + 1, limits.requests)
            if wait_s == 0.0:
                self._write(at, key, row._replace(requests=row.requests + 1))
            return wait_s

    def hold_tokens(self, key: bytes, limits: Limits, tokens: int) -> float:
        """Set so many tokens aside and return 0; where they do not fit, return in how many seconds they may.

        Only a guess where others are held: their requests may end earlier, or use all of them.
        """
        if limits.tokens is None:
            return 0.0
        with self._locked():
            at = self._find(key)
            row = self._read(at, limits)
            wait_s = _wait_s(row.tokens + self._held_in_all(at) + tokens, limits.tokens)
            if wait_s == 0.0:
                self._write(at, key, row)
                self._hold(at, tokens)
            return wait_s

    def spend_tokens(self, key: bytes, limits: Limits, held: int, spent: int) -> None:
        """Give back what was held, and count what was used of it, which may be more."""
        if limits.tokens is None:
            return
        with self._locked():
            at = self._find(key)
            row = self._read(at, limits)
            self._write(at, key, row._replace(tokens=row.tokens + spent))
            self._hold(at, -held)

    # Rows

    def _find(self, key: bytes) -> int:
        """Return where the key's row is; a new one is zeros, which is what an unused key's is."""
        at = self._places.get(key)
        if at is None or self._rows[at : at + KEY_BYTES] != key:
            if len(self._places) >= ROWS:
                self._places.clear()
            at = self._places[key] = self._search(key)
        return at

    def _search(self, key: bytes) -> int:
        first = int.from_bytes(key[:8], "little")
        places = [(first + step) % ROWS * self._stride for step in range(NEIGHBOURS)]
        oldest, oldest_s = places[0], float("inf")
        for at in places:
            known, updated_s, _, _ = _HEAD.unpack_from(self._rows, at)
            if known == key:
                return at
            # One that holds tokens is the last to go.
            rank_s = updated_s + (1e12 if any(self._held.unpack_from(self._rows, at + _HEAD.size)) else 0.0)
            if rank_s < oldest_s:
                oldest, oldest_s = at, rank_s
        self._rows[oldest : oldest + self._stride] = key + bytes(self._stride - KEY_BYTES)
        return oldest

    def _read(self, at: int, limits: Limits) -> _Row:
        """Return the row as it is now."""
        _, updated_s, requests, tokens = _HEAD.unpack_from(self._rows, at)
        now_s = self._clock()
        minutes = max(0.0, now_s - updated_s) / MINUTE_S
        return _Row(now_s, _drained(requests, limits.requests, minutes), _drained(tokens, limits.tokens, minutes))

    def _write(self, at: int, key: bytes, row: _Row) -> None:
        _HEAD.pack_into(self._rows, at, key, *row)

    def _held_in_all(self, at: int) -> float:
        return math.fsum(self._held.unpack_from(self._rows, at + _HEAD.size))

    def _hold(self, at: int, tokens: int) -> None:
        """Nobody but this process writes this number."""
        (held,) = _COUNT.unpack_from(self._rows, at + self._own)
        _COUNT.pack_into(self._rows, at + self._own, max(0.0, held + tokens))

    def _forget_held(self) -> None:
        """A process that died with this number holds nothing any more."""
        for at in range(self._own, len(self._rows), self._stride):
            if _COUNT.unpack_from(self._rows, at) != (0.0,):
                _COUNT.pack_into(self._rows, at, 0.0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        is_locked = self._fd is not None and self._lock(self._fd)
        try:
            yield
        finally:
            if is_locked and self._fd is not None:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _lock(self, fd: int) -> bool:
        for attempt in range(self._tries):
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # POSIX leaves open which of the two says that it is taken
                time.sleep(0.0 if attempt < QUICK_TRIES else LOCK_PAUSE_S)
            else:
                self._tries = LOCK_TRIES
                return True
        self._tries = 1
        return False


def _drained(used: float, limit: int | None, minutes: float) -> float:
    return 0.0 if limit is None else max(0.0, used - minutes * limit)


def _wait_s(used: float, limit: int) -> float:
    return max(0.0, used - limit) / limit * MINUTE_S
