"""The disk tier: what is asked of it, and how each piece of work is done and reported.

What it holds is known in memory (kvstore/disk/held.py); a caller never waits for the disk. Threads read and write, and
kvstore/disk/upkeep.py does the rest.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.books import Books, Quotas
from kvstore.breaker import Breaker
from kvstore.codec import ObjectCodec, PlainCodec
from kvstore.counters import TierCounters
from kvstore.disk.files import ObjectFiles, Scratch, padded, takes_direct, unlink
from kvstore.disk.held import HeldObjects
from kvstore.disk.place import Place, lock_exclusively
from kvstore.disk.upkeep import Space, Upkeep
from kvstore.errors import CorruptObjectError, TierUnusableError
from kvstore.eviction import LRU, Eviction
from kvstore.namespace import Namespace
from kvstore.object_key import ObjectKey
from kvstore.tier import Deadline, EventSink, Outcome, Put, Report, TierName, TierStats, Want
from kvstore.work import Job, Kind, WorkQueue

log = logging.getLogger(__name__)

READERS = 4
WRITERS = 2
MIN_FREE_BYTES = 1 << 30
MAX_QUEUED_BYTES = 256 << 20

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What network file systems say that know no locks."""

DiskWork = Callable[[Scratch], Outcome]
"""Does a piece of work; may raise OSError."""


class DiskTier:
    """Objects as files below `root`, at most `capacity_bytes` of them, and at least `min_free_bytes` of the file system
    left to others. Raises TierUnusableError when the directory cannot be used, or another process has it.

    A `shared` directory may be used by several processes and machines: of those one counts and evicts, and the others
    find objects by asking the file system. `direct` None passes the page cache by where the file system allows it.
    `max_queued_bytes` bounds what saves keep waiting; more is refused. `codec` may encrypt (kvstore/encryption.py).
    """

    def __init__(
        self,
        root: Path,
        capacity_bytes: int,
        *,
        min_free_bytes: int = MIN_FREE_BYTES,
        quotas: Quotas | None = None,
        policy: Callable[[], Eviction[ObjectKey]] = LRU,
        on_event: EventSink | None = None,
        shared: bool = False,
        direct: bool | None = None,
        sync: bool = False,
        readers: int = READERS,
        writers: int = WRITERS,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        codec: ObjectCodec | None = None,
    ) -> None:
        self.name: TierName = "remote" if shared else "disk"
        self.place = Place(root)
        self.place.create()
        self._capacity_bytes, self._max_queued_bytes = capacity_bytes, max_queued_bytes
        self._codec = codec or PlainCodec()
        lock = self._open(shared)
        try:
            self.direct = takes_direct(self.place) if direct is None else direct
            if not shared:
                self.place.clear_incoming(0)
        except OSError as error:
            if lock is not None:
                os.close(lock)
            raise TierUnusableError(f"{root}: {error.strerror}") from error
        self._files = ObjectFiles(self.place, direct=self.direct, sync=sync)
        self._counters = TierCounters()
        self._breakers: dict[Kind, Breaker] = {"load": Breaker(), "save": Breaker()}
        self._queue = WorkQueue[DiskWork]()
        self._held = HeldObjects(
            Books(capacity_bytes, quotas, policy),
            capacity_bytes,
            on_event or (lambda event: None),
            shared=shared,
            evicts=lock is not None,
        )
        self._space = Space(self.place, self._held, self._counters, min_free_bytes)
        self._upkeep = Upkeep(self.place, self._held, self._space, lock)
        counts: dict[Kind, int] = {"load": readers, "save": writers}
        self._threads = [
            threading.Thread(target=self._run, args=(kind,), name=f"kv-disk-{kind}", daemon=True)
            for kind, count in counts.items()
            for _ in range(count)
        ]
        self._threads.append(threading.Thread(target=self._watch, name="kv-disk-watch", daemon=True))
        for thread in self._threads:
            thread.start()

    def describe(self, namespace: Namespace) -> None:
        """Leave the namespace in plain text beside its objects, for people who look at the directory."""
        self._upkeep.soon(lambda: self.place.describe(namespace))

    def probe(self, keys: Sequence[ObjectKey], deadline: Deadline, report: Report) -> None:
        known = self._leading(keys, lambda key: self._held.look(key) == "held")
        if known == len(keys) or self._held.look(keys[known]) == "absent" or self._breakers["load"].shut:
            report(0, Outcome("ok", known))
            return

        def work(scratch: Scratch) -> Outcome:
            return Outcome("ok", known + self._leading(keys[known:], self._is_there))

        def finish(outcome: Outcome, busy_s: float) -> None:
            report(0, outcome if outcome.status == "ok" else Outcome(outcome.status, known, outcome.detail))

        job = Job[DiskWork]("load", work, finish, deadline)
        if not self._queue.put("load", [job]):
            finish(Outcome("cancelled"), 0.0)

    def load(self, wants: Sequence[Want], deadline: Deadline, report: Report) -> None:
        jobs = [self._load_job(index, want, deadline, report) for index, want in enumerate(wants)]
        shut = self._breakers["load"].shut
        queued = []
        for job, want in zip(jobs, wants, strict=True):
            if self._held.look(want.key) == "absent":
                job.finish(Outcome("miss"), 0.0)
            elif shut:
                job.finish(Outcome("refused", detail="the breaker is open"), 0.0)
            else:
                queued.append(job)
        self._put("load", queued)

    def save(self, puts: Sequence[Put], deadline: Deadline, report: Report) -> None:
        shut, (_, queued_bytes) = self._breakers["save"].shut, self._queue.waiting("save")
        queued = []
        for index, put in enumerate(puts):
            job = self._save_job(index, put, deadline, report)
            queued_bytes += job.size_bytes
            if shut:
                job.finish(Outcome("refused", detail="the breaker is open"), 0.0)
            elif queued_bytes > self._max_queued_bytes:
                job.finish(Outcome("refused", detail="too much waits to be written"), 0.0)
            else:
                queued.append(job)
        self._put("save", queued)

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        self._held.touch(keys)

    def pin(self, keys: Sequence[ObjectKey], seconds: float) -> int:
        return self._held.pin(keys, seconds)

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        self._held.delete(keys)
        self._upkeep.wake()

    def drop(self, namespace: bytes | None = None, owner: bytes | None = None) -> None:
        self._held.drop(namespace, owner)
        self._upkeep.wake()

    def set_quota(self, owner: bytes, limit_bytes: int | None) -> None:
        self._held.set_quota(owner, limit_bytes)

    def owners(self) -> list[tuple[bytes, int, int | None]]:
        """Return each owner with its bytes and its quota, as far as this process counts."""
        return self._held.owners()

    def stats(self) -> TierStats:
        saves, save_bytes = self._queue.waiting("save")
        objects, used_bytes, pinned_bytes = self._held.totals()
        return TierStats(
            tier=self.name,
            objects=objects,
            used_bytes=used_bytes,
            pinned_bytes=pinned_bytes,
            capacity_bytes=self._capacity_bytes,
            queued_loads=self._queue.waiting("load")[0],
            queued_saves=saves,
            queued_bytes=save_bytes,
            load_breaker=self._breakers["load"].state,
            save_breaker=self._breakers["save"].state,
            breaker_trips_total=sum(breaker.trips for breaker in self._breakers.values()),
            unindexed=not self._held.indexed,
            **self._counters.fields(),
        )

    def close(self, deadline: Deadline) -> None:
        self._queue.close()
        self._queue.wait_idle(deadline)
        for job in self._queue.cancel():
            job.finish(Outcome("cancelled"), 0.0)
        self._upkeep.close(deadline)
        for thread in self._threads:
            thread.join(deadline.left_s)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books agree with themselves; for a tier that has nothing to do."""
        self._held.check_integrity()

    def _open(self, shared: bool) -> int | None:
        try:
            lock = lock_exclusively(self.place)
        except OSError as error:
            if shared and error.errno in WITHOUT_LOCKS:
                log.warning("%s has no file locks (%s): nobody evicts there", self.place.root, error.strerror)
                return None
            raise TierUnusableError(f"{self.place.root}: {error.strerror}") from error
        if lock is None and not shared:
            raise TierUnusableError(f"{self.place.root} is in use by another process")
        return lock

    # The threads

    def _put(self, kind: Kind, jobs: Sequence[Job[DiskWork]]) -> None:
        if jobs and not self._queue.put(kind, jobs):
            for job in jobs:
                job.finish(Outcome("cancelled"), 0.0)

    def _run(self, kind: Kind) -> None:
        scratch = Scratch()
        while (job := self._queue.take(kind)) is not None:
            begun = time.monotonic()
            try:
                outcome = Outcome("late") if job.deadline.passed else self._try(job, scratch)
            except Exception as error:
                log.exception("a fault in the disk tier")
                outcome = Outcome("failed", detail=repr(error))
            self._queue.done(job)
            job.finish(outcome, time.monotonic() - begun)

    def _try(self, job: Job[DiskWork], scratch: Scratch) -> Outcome:
        breaker = self._breakers[job.kind]
        if not breaker.admit():
            return Outcome("refused", detail="the breaker is open")
        try:
            outcome = job.work(scratch)
        except OSError as error:
            outcome = Outcome("failed", detail=f"{errno.errorcode.get(error.errno or 0, '?')}: {error}")
        if job.hanging:
            return outcome
        if outcome.status == "failed":
            breaker.failed()
        elif outcome.status in ("ok", "miss", "corrupt"):
            breaker.succeeded()
        else:
            breaker.unknown()
        return outcome

    def _watch(self) -> None:
        """Report what waited past its deadline, and count what hangs as failures of the disk."""
        pause = threading.Event()
        while self._queue.wait_busy():
            late, hanging = self._queue.expire()
            for job in hanging:
                self._breakers[job.kind].failed()
            for job in late:
                job.finish(Outcome("late"), 0.0)
            pause.wait(0.05)

    # The work

    def _load_job(self, index: int, want: Want, deadline: Deadline, report: Report) -> Job[DiskWork]:
        def finish(outcome: Outcome, busy_s: float) -> None:
            self._counters.loaded(outcome, busy_s)
            report(index, outcome)

        return Job("load", lambda scratch: self._read(want, scratch), finish, deadline, want.target.nbytes)

    def _save_job(self, index: int, put: Put, deadline: Deadline, report: Report) -> Job[DiskWork]:
        def finish(outcome: Outcome, busy_s: float) -> None:
            self._counters.saved(outcome, busy_s)
            report(index, outcome)

        drops = self._held.drops
        return Job("save", lambda scratch: self._write(put, drops, deadline, scratch), finish, deadline, put.size_bytes)

    def _read(self, want: Want, scratch: Scratch) -> Outcome:
        path = self.place.path_of(want.key)
        try:
            self._files.read(path, want.target, scratch, time.time())
            self._codec.open(want.target, want.key)
        except FileNotFoundError:
            self._held.missing(want.key)
            return Outcome("miss")
        except CorruptObjectError as error:
            self._quarantine(want.key, path, error)
            return Outcome("corrupt", detail=str(error))
        self._held.used(want.key)
        return Outcome("ok", want.target.nbytes)

    def _write(self, put: Put, drops: int, deadline: Deadline, scratch: Scratch) -> Outcome:
        if not self._held.wait_settled(put.key, deadline):
            return Outcome("late")
        if self._held.look(put.key) == "held" or (self._held.look(put.key) == "unknown" and self._is_there(put.key)):
            return Outcome("ok")
        try:
            parts = self._codec.seal(put.key, put.parts)
        except CorruptObjectError as error:
            return Outcome("refused", detail=str(error))
        owner, least = put.key.owner, padded(put.size_bytes)
        if not self._space.make(owner, least):
            return Outcome("refused", detail="no room")
        temporary, path = self.place.temporary(), self.place.path_of(put.key)
        try:
            size_bytes = self._files.write(temporary, parts, scratch)
            self._files.publish(temporary, path)
        except OSError as error:
            self._held.give_up(owner, least)
            self._abandon(temporary)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._space.free_some(2 * least)
            raise
        if self._held.stored(put.key, size_bytes, put.size_bytes, reserved_bytes=least, drops=drops):
            return Outcome("ok", put.size_bytes)
        unlink(path)
        return Outcome("cancelled", detail="dropped meanwhile")

    def _quarantine(self, key: ObjectKey, path: str, error: CorruptObjectError) -> None:
        self._counters.corrupt(error.fault)
        log.warning("an object on disk is corrupt (%s) and is taken out of use: %s", error, path)
        self._held.condemn(key)
        self.place.set_aside(path)
        self._held.settled(key)

    def _abandon(self, temporary: str) -> None:
        """What cannot be deleted now is cleared when it is old."""
        if os.path.lexists(temporary):
            try:
                unlink(temporary)
            except OSError as error:
                log.warning("%s is left behind: %s", temporary, error)

    def _is_there(self, key: ObjectKey) -> bool:
        return self._held.look(key) != "absent" and os.path.exists(self.place.path_of(key))

    @staticmethod
    def _leading(keys: Sequence[ObjectKey], holds: Callable[[ObjectKey], bool]) -> int:
        return next((index for index, key in enumerate(keys) if not holds(key)), len(keys))
