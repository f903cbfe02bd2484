"""Blocks on their way into an engine's device: fetched into memory where they are not, checked, and copied in order."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.block_format import check
from kvstore.errors import CorruptObjectError
from kvstore.layout import ObjectLayout
from kvstore.manager.contract import DeviceMemory, Loaded, Piece
from kvstore.manager.cost import FetchCost
from kvstore.manager.fetching import Fetches
from kvstore.manager.requests import KnownRequest
from kvstore.object_key import ObjectKey
from kvstore.ram.leases import Lease
from kvstore.ram.tier import RamTier
from kvstore.tier import Deadline, Tier, TierName

log = logging.getLogger(__name__)

BASE_S = 0.25
PER_1024_TOKENS_S = 0.25
"""A load's deadline: what has not come by then is computed."""

BATCH_BYTES = 16 << 20
"""Of objects that are copied at once."""


@dataclass(slots=True, eq=False)
class _Part:
    key: ObjectKey
    layout: ObjectLayout
    block_id: int
    lease: Lease | None = None


@dataclass(slots=True, eq=False)
class LoadJob:
    """`blocks` are the parts of each block in turn, `tiers` where they were seen. `missing` counts the parts of a block
    that are still to come, `lost` are blocks of which one will not."""

    request: KnownRequest
    blocks: list[list[_Part]]
    tiers: Sequence[TierName]
    deadline: Deadline
    begun_s: float = field(default_factory=time.monotonic)
    missing: list[int] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    loaded: int = 0
    error: str | None = None


class Loader:
    """One thread copies for all loads of a client, whatever comes first; fetches run in the tiers' threads."""

    def __init__(
        self,
        ram: RamTier,
        lower: Sequence[Tier],
        fetches: Fetches,
        memory: DeviceMemory,
        cost: FetchCost,
        on_loaded: Callable[[KnownRequest, Loaded], None],
    ) -> None:
        self._ram, self._lower, self._fetches, self._memory, self._cost = ram, list(lower), fetches, memory, cost
        self._on_loaded = on_loaded
        self._changed = threading.Condition()
        self._new: list[LoadJob] = []
        self._jobs: list[LoadJob] = []
        self._woken = self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-load", daemon=True)
        self._thread.start()

    def add(
        self, request: KnownRequest, start: int, block_ids: Sequence[Sequence[int]], tiers: Sequence[TierName]
    ) -> None:
        """Load blocks from `start` on, as many as `block_ids` has of each group."""
        end = start + len(block_ids[0])
        blocks = [
            [
                _Part(
                    layout.key(request.parts.digest, request.owner, request.keys[index]),
                    layout,
                    block_ids[layout.group][index - start],
                )
                for layout in request.parts.all
                if block_ids[layout.group][index - start] != 0
            ]
            for index in range(start, end)
        ]
        tokens = len(blocks) * request.parts.block_size
        job = LoadJob(request, blocks, tiers, Deadline.after(BASE_S + PER_1024_TOKENS_S * tokens / 1024))
        with self._changed:
            self._new.append(job)
            self._wake()

    def close(self) -> None:
        """On the return nothing is copied any more; loads that were under way end with what they have."""
        with self._changed:
            self._closing = True
            self._wake()
        self._thread.join()

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
        absent: list[tuple[int, _Part]] = []
        for index, parts in enumerate(job.blocks):
            for part in parts:
                part.lease = self._ram.lease(part.key, job.request.request_id)
            missing = [part for part in parts if part.lease is None]
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
        """Copy what has come, in order; return whether the load has ended."""
        while True:
            with self._changed:
                ready, size = job.loaded, 0
                while ready < len(job.blocks) and not job.missing[ready] and ready not in job.lost:
                    size += sum(part.layout.object_bytes for part in job.blocks[ready])
                    ready += 1
                    if size >= BATCH_BYTES:
                        break
            if ready == job.loaded:
                return ready == len(job.blocks) or ready in job.lost or job.deadline.passed
            blocks = job.blocks[job.loaded : ready]
            copied = self._copy(job, blocks)
            job.loaded += copied
            if copied < len(blocks):
                return True

    def _copy(self, job: LoadJob, blocks: Sequence[Sequence[_Part]]) -> int:
        """Check blocks and copy those before the first that is wrong; return how many."""
        good: list[Sequence[_Part]] = []
        for block in blocks:
            if not all(self._is_right(job, part) for part in block):
                break
            good.append(block)
        parts = [part for block in good for part in block]
        pieces = [
            Piece(part.layout, (part.block_id,), part.lease.view[part.layout.header_bytes :])
            for part in parts
            if part.lease is not None
        ]
        try:
            self._memory.write(pieces)
        except Exception as error:
            log.exception("blocks could not be loaded")
            job.error = f"the device failed: {error}"
            return 0
        self._release(parts)
        return len(good)

    def _is_right(self, job: LoadJob, part: _Part) -> bool:
        assert part.lease is not None, "a block is ready that is not there"
        try:
            check(part.lease.view, part.key, part.layout)
        except CorruptObjectError as error:
            self._ram.corrupt(part.key, error)
            job.error = f"a stored block is corrupt ({error.fault})"
            return False
        return True

    def _end(self, job: LoadJob, *, closing: bool) -> None:
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
