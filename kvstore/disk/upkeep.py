"""What keeps a disk tier in order beside reading and writing: space, deletions, leftovers, learning what is there."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from kvstore.books import Entry
from kvstore.counters import TierCounters
from kvstore.disk.files import unlink
from kvstore.disk.held import HeldObjects
from kvstore.disk.place import FoundObject, Place, lock_exclusively
from kvstore.object_key import ObjectKey
from kvstore.tier import Deadline

log = logging.getLogger(__name__)

PASSING = (errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV)
"""Errors of the disk, not of one file: another file would fare no better, and this one may be tried again."""

WATCH_S = 5.0
LEFTOVER_S = 600.0
"""A file that nobody has finished after so long is a dead writer's."""

REWALK_S = 600.0
"""How often the process that counts looks for what others wrote into a shared directory."""

LOCK_RETRY_S = 5.0

FOUND_AT_ONCE = 256
"""Objects that are entered under one lock."""


class Space:
    """Room for objects, made by eviction."""

    def __init__(self, place: Place, held: HeldObjects, counters: TierCounters, min_free_bytes: int) -> None:
        self._place, self._held, self._counters, self._min_free_bytes = place, held, counters, min_free_bytes

    def make(self, owner: bytes, size_bytes: int) -> bool:
        """Set space aside for an object, after evicting others where it takes that. Raises OSError."""
        while True:
            found = self._held.reserve(owner, size_bytes, lacking=self._lacks(size_bytes))
            if isinstance(found, bool):
                return found
            self._evict(found)

    def free_some(self, size_bytes: int) -> None:
        """Evict about so many bytes: the disk said that it is full. Raises OSError."""
        freed = 0
        while freed < size_bytes and (entry := self._held.excess(lacking=True)) is not None:
            self._evict(entry)
            freed += entry.size_bytes

    def keep_limits(self) -> None:
        """Evict what is too much, because the limits are new or others fill the disk. Raises OSError."""
        while (entry := self._held.excess(lacking=self._lacks(0))) is not None:
            self._evict(entry)

    def _lacks(self, size_bytes: int) -> bool:
        status = os.statvfs(self._place.root)
        return status.f_bavail * status.f_frsize - size_bytes < self._min_free_bytes

    def _evict(self, entry: Entry) -> None:
        """Delete an object's file; one that cannot be deleted is passed over from now on. Raises OSError where another
        file would fare no better."""
        try:
            unlink(self._place.path_of(entry.key))
        except OSError as error:
            self._held.stays(entry, undeletable=error.errno not in PASSING)
            if error.errno in PASSING:
                raise
            log.warning("an object cannot be evicted: %s", error)
        else:
            self._held.settled(entry.key)
            self._counters.evicted(entry.size_bytes)


class Upkeep:
    """Threads beside those that read and write. `lock` is the descriptor of the directory's lock, None where another
    process has it: this one tries to get it then, and counts and evicts from there on."""

    def __init__(self, place: Place, held: HeldObjects, space: Space, lock: int | None) -> None:
        self._place, self._held, self._space, self._lock = place, held, space, lock
        self._changed = threading.Condition()
        self._errands: deque[Callable[[], None]] = deque()
        self._stuck: list[ObjectKey] = []
        self._woken = False
        self._closing = threading.Event()
        self._doomed = threading.Event()
        runs = {"walk": self._walk, "sweep": self._sweep, "doom": self._remove_doomed}
        self._threads = [
            threading.Thread(target=run, name=f"kv-disk-{name}", daemon=True) for name, run in runs.items()
        ]
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """There is something to delete."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def soon(self, errand: Callable[[], None]) -> None:
        """Have something done that may raise OSError."""
        with self._changed:
            self._errands.append(errand)
        self.wake()

    def close(self, deadline: Deadline) -> None:
        """Do what waits, until the deadline, and give the directory's lock back."""
        self._closing.set()
        self._doomed.set()
        self.wake()
        for thread in self._threads:
            thread.join(deadline.left_s)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # Learning what is there

    def _walk(self) -> None:
        """Once, or again and again where others write too; by the process that counts."""
        while True:
            if self._lock is None and (lock := self._try_lock()) is not None:
                self._lock, self._held.evicts = lock, True
            pause_s = LOCK_RETRY_S
            if self._lock is not None and self._index():
                if not self._held.shared:
                    return
                pause_s = REWALK_S
            if self._closing.wait(pause_s):
                return

    def _try_lock(self) -> int | None:
        try:
            return lock_exclusively(self._place)
        except OSError as error:
            log.warning("the lock of %s cannot be had: %s", self._place.root, error)
            return None

    def _index(self) -> bool:
        """Enter what is there, what was used last first; return whether all of it was seen."""
        self._held.walk_begins()
        found = self._find()
        for start in range(0, len(found or ()), FOUND_AT_ONCE):
            self._held.add_found((found or [])[start : start + FOUND_AT_ONCE])
        self._held.walk_ends(complete=found is not None)
        self.wake()
        return found is not None

    def _find(self) -> list[FoundObject] | None:
        """Return all objects, what was used last first; None when not all could be seen."""
        found = []
        try:
            for one in self._place.walk():
                if self._closing.is_set():
                    return None
                found.append(one)
        except OSError as error:
            log.warning("%s cannot be read: %s", self._place.root, error)
            return None
        return sorted(found, key=lambda one: one.modified_s, reverse=True)

    # Deleting

    def _sweep(self) -> None:
        next_look_s = time.monotonic() + WATCH_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._woken or self._closing.is_set(), WATCH_S)
                self._woken = False
            self._logging(self._run_errands)
            self._logging(self._drop_all)
            self._delete_all()
            if self._closing.is_set():
                return
            self._logging(self._place.restore)  # somebody may have removed them
            self._logging(self._space.keep_limits)
            if time.monotonic() >= next_look_s:
                self._held.delete_again(self._stuck)
                self._stuck.clear()
                self._logging(self._clear_leftovers)
                next_look_s = time.monotonic() + WATCH_S

    def _logging(self, step: Callable[[], None]) -> None:
        """What fails is tried again in the next round."""
        try:
            step()
        except OSError as error:
            log.warning("upkeep of %s: %s", self._place.root, error)

    def _run_errands(self) -> None:
        while self._errands:
            self._errands.popleft()()

    def _drop_all(self) -> None:
        while (selection := self._held.next_drop()) is not None:
            self._place.doom(*selection)
            self._held.dropped()
            self._doomed.set()

    def _delete_all(self) -> None:
        """A file that cannot be deleted stays out of use, and is tried again later."""
        while (key := self._held.next_deletion()) is not None:
            try:
                unlink(self._place.path_of(key))
            except OSError as error:
                log.warning("an object cannot be deleted: %s", error)
                self._stuck.append(key)
            else:
                self._held.settled(key)

    def _clear_leftovers(self) -> None:
        """Delete what writers left that died, here or on another machine, and what is doomed of old."""
        self._place.clear_incoming(LEFTOVER_S)
        self._doomed.set()

    def _remove_doomed(self) -> None:
        """Delete whole directories, however long that takes; what a crash leaves is deleted by the next process."""
        while not self._closing.is_set():
            self._doomed.wait()
            self._doomed.clear()
            self._logging(lambda: self._place.clear_doomed(self._closing.is_set))
