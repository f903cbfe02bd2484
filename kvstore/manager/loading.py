"""Blocks on their way into an engine's device: fetched into memory where they are not, checked, and copied in order."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from kvstore.block_format import check
from kvstore.errors import CorruptObjectError
from kvstore.layout import ObjectLayout
from kvstore.manager.checking import CheckProcesses
from kvstore.manager.contract import DeviceMemory, Loaded, Piece
from kvstore.manager.cost import FetchCost
from kvstore.manager.fetching import Fetches
from kvstore.manager.requests import KnownRequest
from kvstore.object_key import ObjectKey
from kvstore.quick_check import QuickCheck
from kvstore.ram.leases import Lease
from kvstore.ram.tier import RamTier
from kvstore.tier import Deadline, Tier, TierName

log = logging.getLogger(__name__)

BASE_S = 0.25
PER_1024_TOKENS_S = 0.25
"""A load's deadline: what has not come by then is computed."""

RUN_BYTES = 8 << 20
"""Of blocks that are checked by one thread at a time."""

AHEAD_BYTES = 128 << 20
"""Of blocks that are checked before those in front of them were copied."""

COPY_BYTES = 64 << 20
"""Of blocks that are copied at once: devices are faster with many."""

MIN_CHECK_S = 1.0

CHECKERS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Threads that check. One does about 10 GB/s from memory."""


@dataclass(slots=True, eq=False)
class _Part:
    key: ObjectKey
    number: int
    layout: ObjectLayout
    check: QuickCheck
    block_id: int
    lease: Lease | None = None


_Block = list[_Part]


@dataclass(slots=True, eq=False)
class _Run:
    """Blocks in a row. `good` is how many of them are right before the first that is not."""

    blocks: Sequence[_Block]
    size_bytes: int
    good: Future[int]


@dataclass(slots=True, eq=False)
class LoadJob:
    """`blocks` are the parts of each block in turn, `tiers` where they were seen. `missing` counts the parts of a block
    that are still to come, `lost` are blocks of which one will not. Blocks before `begun` are in memory and being
    checked, those before `loaded` are on the device."""

    request: KnownRequest
    start: int
    block_ids: Sequence[Sequence[int]]
    tiers: Sequence[TierName]
    deadline: Deadline
    begun_s: float = field(default_factory=time.monotonic)
    blocks: list[_Block] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    runs: deque[_Run] = field(default_factory=deque)
    begun: int = 0
    loaded: int = 0
    error: str | None = None


class Loader:
    """One thread copies for all loads of a client, whatever comes first; fetches run in the tiers' threads, and checks
    in threads of its own or in `processes`."""

    def __init__(
        self,
        ram: RamTier,
        lower: Sequence[Tier],
        fetches: Fetches,
        memory: DeviceMemory,
        cost: FetchCost,
        on_loaded: Callable[[KnownRequest, Loaded], None],
        processes: CheckProcesses | None = None,
    ) -> None:
        self._processes = processes
        self._ram, self._lower, self._fetches, self._memory, self._cost = ram, list(lower), fetches, memory, cost
        self._on_loaded = on_loaded
        self._changed = threading.Condition()
        self._new: list[LoadJob] = []
        self._jobs: list[LoadJob] = []
        self._woken = self._closing = False
        self._checkers = ThreadPoolExecutor(CHECKERS, "kv-check")
        self._thread = threading.Thread(target=self._run, name="kv-load", daemon=True)
        self._thread.start()

    def add(
        self, request: KnownRequest, start: int, block_ids: Sequence[Sequence[int]], tiers: Sequence[TierName]
    ) -> None:
        """Load blocks from `start` on, as many as `block_ids` has of each group."""
        tokens = len(block_ids[0]) * request.parts.block_size
        deadline = Deadline.after(BASE_S + PER_1024_TOKENS_S * tokens / 1024)
        with self._changed:
            self._new.append(LoadJob(request, start, block_ids, tiers, deadline))
            self._wake()

    def close(self) -> None:
        """On the return nothing is copied any more; loads that were under way end with what they have."""
        with self._changed:
            self._closing = True
            self._wake()
        self._thread.join()
        self._checkers.shutdown()

    def _wake(self) -> None:
        self._woken = True
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                nearest = min((job.deadline.left_s for job in self._jobs), default=None)
                self._changed.wait_for(lambda: self._woken, nearest)
                self._woken = False
                new, self._new, closing = self._new, [], self._closing
            for job in new:
                self._jobs.append(job)
                if not closing:
                    self._begin(job)
            for job in list(self._jobs):
                if closing or self._advance(job):
                    self._jobs.remove(job)
                    self._end(job, closing=closing)
            if closing:
                return

    def _begin(self, job: LoadJob) -> None:
        """Hold what is in memory, all of it before room is made for anything else; fetch the rest, the first first."""
        job.blocks = _blocks(job)
        parts = [part for block in job.blocks for part in block]
        keys = [part.key for part in parts]
        for part, lease in zip(parts, self._ram.lease_all(keys, job.request.request_id), strict=True):
            part.lease = lease
        for tier in self._lower:
            tier.touch(keys)  # or a prefix would age there while it is served from memory
        absent: list[tuple[int, _Part]] = []
        for index, block in enumerate(job.blocks):
            missing = [part for part in block if part.lease is None]
            job.missing.append(len(missing))
            absent += [(index, part) for part in missing]
        waiting: dict[ObjectKey, tuple[int, _Part]] = {part.key: (index, part) for index, part in absent}

        def on_fetched(key: ObjectKey, found: bool) -> None:
            index, part = waiting[key]
            with self._changed:
                if job in self._jobs:
                    part.lease = self._ram.lease(key, job.request.request_id) if found else None
                    job.missing[index] -= 1
                    if part.lease is None:
                        job.lost.add(index)
                    self._wake()

        for name in dict.fromkeys(job.tiers):
            tiers = [tier for tier in self._lower if name in ("ram", tier.name)]
            wanted = [(part.key, part.layout.object_bytes) for index, part in absent if job.tiers[index] == name]
            if wanted:
                self._fetches.fetch(wanted, tiers, job.deadline, on_fetched)

    def _advance(self, job: LoadJob) -> bool:
        """Copy what has come and is right, in order; return whether the load has ended."""
        while True:
            self._check_ahead(job)
            if not job.runs:
                return job.loaded == len(job.blocks) or job.loaded in job.lost or job.deadline.passed
            runs, size = [job.runs.popleft()], 0
            self._await(runs[0], job.deadline)
            while job.runs and job.runs[0].good.done() and size < COPY_BYTES:
                size += runs[-1].size_bytes
                runs.append(job.runs.popleft())
            blocks: list[_Block] = []
            for run in runs:
                blocks += run.blocks[: run.good.result()]
                if run.good.result() < len(run.blocks):
                    break
            if not self._copy(job, blocks) or len(blocks) < sum(len(run.blocks) for run in runs):
                return True

    def _check_ahead(self, job: LoadJob) -> None:
        """Begin to check blocks that are in memory."""
        ahead = sum(run.size_bytes for run in job.runs)
        while ahead < AHEAD_BYTES:
            with self._changed:
                ready, size = job.begun, 0
                while ready < len(job.blocks) and not job.missing[ready] and ready not in job.lost and size < RUN_BYTES:
                    size += sum(part.layout.object_bytes for part in job.blocks[ready])
                    ready += 1
            if ready == job.begun:
                return
            blocks = job.blocks[job.begun : ready]
            job.runs.append(_Run(blocks, size, self._begin_check(job, blocks)))
            job.begun, ahead = ready, ahead + size

    def _begin_check(self, job: LoadJob, blocks: Sequence[_Block]) -> Future[int]:
        """Have blocks checked, by a process where there is one."""
        objects = [
            (part.number, part.lease.offset, part.key) for block in blocks for part in block if part.lease is not None
        ]
        asked = None if self._processes is None else self._processes.ask(objects)
        if asked is None:
            return self._checkers.submit(self._check, job, blocks)
        good: Future[int] = Future()

        def answered(answer: Future[int]) -> None:
            try:  # what is wrong, or was not checked, is looked at again here
                good.set_result(len(blocks) if answer.result() == len(objects) else self._check(job, blocks))
            except BaseException as error:
                good.set_exception(error)

        asked.add_done_callback(answered)
        return good

    def _await(self, run: _Run, deadline: Deadline) -> None:
        """Wait for a check, but for no process that hangs."""
        try:
            run.good.result(max(MIN_CHECK_S, deadline.left_s))
        except TimeoutError:
            if self._processes is not None:
                self._processes.kill()
            run.good.result()

    def _check(self, job: LoadJob, blocks: Sequence[_Block]) -> int:
        """Return how many blocks are right before the first that is not."""
        for index, block in enumerate(blocks):
            if not all(self._is_right(job, part) for part in block):
                return index
        return len(blocks)

    def _is_right(self, job: LoadJob, part: _Part) -> bool:
        assert part.lease is not None, "a block is ready that is not there"
        if part.check.passes(part.lease.view, part.key):
            return True
        try:
            check(part.lease.view, part.key, part.layout)
        except CorruptObjectError as error:
            self._ram.corrupt(part.key, error)
            job.error = f"a stored block is corrupt ({error.fault})"
            return False
        return True

    def _copy(self, job: LoadJob, blocks: Sequence[_Block]) -> bool:
        parts = [part for block in blocks for part in block]
        pieces = [_piece(part) for part in parts]
        try:
            self._memory.write(pieces)
        except Exception as error:
            log.exception("blocks could not be loaded")
            job.error = f"the device failed: {error}"
            return False
        self._release(parts)
        job.loaded += len(blocks)
        return True

    def _end(self, job: LoadJob, *, closing: bool) -> None:
        wait([run.good for run in job.runs])  # nothing is read any more
        with self._changed:  # no lease is taken any more
            left = [part for parts in job.blocks for part in parts]
        self._release(left)
        complete = job.loaded == len(job.blocks)
        if complete and len(set(job.tiers)) == 1:
            size = sum(part.layout.object_bytes for parts in job.blocks for part in parts)
            self._cost.observe(job.tiers[0], size, time.monotonic() - job.begun_s)
        if not complete and job.error is None:
            job.error = "the store was closed" if closing else "late" if job.deadline.passed else "a block was gone"
        self._on_loaded(job.request, Loaded(job.request.request_id, job.loaded, job.error))

    @staticmethod
    def _release(parts: Sequence[_Part]) -> None:
        for part in parts:
            if part.lease is not None:
                part.lease.release()
                part.lease = None


def _piece(part: _Part) -> Piece:
    assert part.lease is not None, "a block is copied that is not there"
    start = part.layout.header_bytes
    return Piece(part.layout, (part.block_id,), part.lease.view[start:], part.lease.address + start)


def _blocks(job: LoadJob) -> list[_Block]:
    """Return the parts of each block in turn, those of groups in which it is wanted."""
    request, parts = job.request, job.request.parts
    return [
        [
            _Part(
                layout.key(parts.digest, request.owner, request.keys[job.start + index]),
                number,
                layout,
                check,
                block_id,
            )
            for number, (layout, check) in enumerate(zip(parts.all, parts.checks, strict=True))
            if (block_id := job.block_ids[layout.group][index]) != 0
        ]
        for index in range(len(job.block_ids[0]))
    ]
