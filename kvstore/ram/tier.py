"""The RAM tier: objects in an arena, found by key, leased to readers, evicted when room is needed.

It is the only tier that others fill and read in place: `reserve` and `lease` hand out its memory. Everything happens in
the caller's thread and takes as long as a copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.block_format import check
from kvstore.books import Books, Entry, Quotas
from kvstore.counters import TierCounters
from kvstore.errors import CorruptObjectError
from kvstore.eviction import LRU, Eviction
from kvstore.object_key import ObjectKey
from kvstore.ram.arena import Arena
from kvstore.ram.leases import Lease, Slot
from kvstore.ram.slabs import Slabs, class_bytes
from kvstore.tier import Deadline, EventSink, Outcome, Put, Report, TierEvent, TierName, TierStats, Want

log = logging.getLogger(__name__)

SLAB_BYTES = 16 << 20


class RamTier:
    """`capacity_bytes` is of the arena. A lease that is never released keeps its memory: it may be under a transfer, so
    it is not taken away but told of (`overdue`)."""

    name: TierName = "ram"

    def __init__(
        self,
        capacity_bytes: int,
        *,
        quotas: Quotas | None = None,
        policy: Callable[[], Eviction[ObjectKey]] = LRU,
        on_event: EventSink | None = None,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        self.arena = Arena(capacity_bytes)
        self._slabs = Slabs(self.arena.capacity_bytes, min(slab_bytes, self.arena.capacity_bytes))
        self._books = Books(capacity_bytes, quotas, policy)
        self._on_event = on_event or (lambda event: None)
        self._counters = TierCounters()
        self._lock = threading.Lock()
        self._slots: dict[Slot, int] = {}
        self._leases: dict[Lease, Entry] = {}
        self._at: dict[int, Entry] = {}
        # Deleted while they were read: gone for everyone else, freed by the last reader.
        self._doomed: dict[int, Entry] = {}
        self._closed = False

    # In place

    def reserve(self, key: ObjectKey, size_bytes: int) -> Slot | None:
        """Return memory for an object, after evicting others where there is no room. None: all that could go is in use,
        pinned or another owner's."""
        with self._lock:
            if self._closed:
                return None
            offset = self._find_room(key.owner, class_bytes(size_bytes))
            if offset is None:
                return None
            self._books.set_aside(key.owner, self._slabs.slot_bytes(offset))
            view, address = self.arena.view(offset, size_bytes), self.arena.address + offset
            slot = Slot(key, view, offset, address, self._publish, self._abandon)
            self._slots[slot] = offset
            return slot

    def lease(self, key: ObjectKey, holder: str) -> Lease | None:
        """Return the object's memory for reading, None when it is not here. Its bytes are not checked."""
        return self.lease_all([key], holder)[0]

    def lease_all(self, keys: Sequence[ObjectKey], holder: str) -> list[Lease | None]:
        """Return the memory of each object that is here."""
        leases: list[Lease | None] = []
        with self._lock:
            for key in keys:
                entry = None if self._closed else self._books.get(key)
                if entry is not None:
                    self._books.use(entry)
                leases.append(None if entry is None else self._lease_on(entry, holder))
        return leases

    def held(self, key: ObjectKey) -> bool:
        with self._lock:
            return self._books.get(key) is not None

    def corrupt(self, key: ObjectKey, error: CorruptObjectError) -> None:
        """A reader of a lease found that the object is not what it should be: count it and forget it."""
        self._counters.corrupt(error.fault)
        self.delete([key])
        log.warning("an object in memory is corrupt (%s) and was dropped", error)

    def overdue(self, age_s: float) -> list[tuple[str, float]]:
        """Return holder and age in seconds of the leases that are at least so old."""
        now = time.monotonic()
        with self._lock:
            ages = [(lease.holder, now - lease.taken_s) for lease in self._leases]
        return [(holder, age) for holder, age in ages if age >= age_s]

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def owners(self) -> list[tuple[bytes, int, int | None]]:
        """Return each owner with its bytes and its quota."""
        with self._lock:
            return self._books.owners()

    # As any tier

    def probe(self, keys: Sequence[ObjectKey], deadline: Deadline, report: Report) -> None:
        with self._lock:
            leading = next((i for i, key in enumerate(keys) if self._books.get(key) is None), len(keys))
        report(0, Outcome("ok", leading))

    def load(self, wants: Sequence[Want], deadline: Deadline, report: Report) -> None:
        for index, want in enumerate(wants):
            begun = time.monotonic()
            outcome = self._refusal(deadline) or self._load(want)
            self._counters.loaded(outcome, time.monotonic() - begun)
            report(index, outcome)

    def save(self, puts: Sequence[Put], deadline: Deadline, report: Report) -> None:
        for index, put in enumerate(puts):
            begun = time.monotonic()
            outcome = self._refusal(deadline) or self._save(put)
            self._counters.saved(outcome, time.monotonic() - begun)
            report(index, outcome)

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        with self._lock:
            self._books.touch(keys)

    def pin(self, keys: Sequence[ObjectKey], seconds: float) -> int:
        with self._lock:
            return self._books.pin(keys, seconds)

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        with self._lock:
            for key in keys:
                if (entry := self._books.get(key)) is not None:
                    self._forget(entry)

    def drop(self, namespace: bytes | None = None, owner: bytes | None = None) -> None:
        with self._lock:
            selected = set(self._books.select(namespace, owner))
            for entry in [entry for entry in self._books if entry.key in selected]:
                self._forget(entry)

    def set_quota(self, owner: bytes, limit_bytes: int | None) -> None:
        with self._lock:
            self._books.set_quota(owner, limit_bytes)

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                tier=self.name,
                objects=len(self._books),
                used_bytes=self._books.used_bytes,
                capacity_bytes=self.arena.capacity_bytes,
                pinned_bytes=self._books.pinned_bytes,
                **self._counters.fields(),
            )

    def close(self, deadline: Deadline) -> None:
        """Views that are still out keep the memory, and can be released as before."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.arena.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books, the slabs, the leases and the reservations agree."""
        with self._lock:
            assert {entry.place: entry for entry in self._books} == self._at, "slots and objects differ"
            used = {entry.place: entry.size_bytes for entry in [*self._books, *self._doomed.values()]}
            assert len(used) == len(self._books) + len(self._doomed), "two objects share a slot"
            assert not set(used) & set(self._slots.values()), "an object lies in a reserved slot"
            used.update({offset: self._slabs.slot_bytes(offset) for offset in self._slots.values()})
            self._slabs.check_integrity(used)
            for offset in [*self._slots.values(), *self._doomed]:
                assert used[offset] == self._slabs.slot_bytes(offset), "a slot is charged for with a wrong size"
            for entry in [*self._books, *self._doomed.values()]:
                assert entry.users == sum(1 for one in self._leases.values() if one is entry), "lost or extra readers"
            assert all(entry.users for entry in self._doomed.values()), "a doomed object without readers"
            assert self._books.used_bytes == sum(used.values()), "the sum of bytes is wrong"
            if not self._slots and not self._doomed:
                self._books.check_integrity()

    def _refusal(self, deadline: Deadline) -> Outcome | None:
        if self._closed:
            return Outcome("cancelled")
        return Outcome("late") if deadline.passed else None

    def _load(self, want: Want) -> Outcome:
        lease = self.lease(want.key, "load")
        if lease is None:
            return Outcome("miss")
        with lease:
            if lease.view.nbytes != want.target.nbytes:
                return Outcome("failed", detail=f"{lease.view.nbytes} bytes, and the target has {want.target.nbytes}")
            _copy(want.target, lease.view)
            try:
                check(want.target, want.key)
            except CorruptObjectError as error:
                self.corrupt(want.key, error)
                return Outcome("corrupt", detail=str(error))
        return Outcome("ok", want.target.nbytes)

    def _save(self, put: Put) -> Outcome:
        if self.held(put.key):
            return Outcome("ok")
        slot = self.reserve(put.key, put.size_bytes)
        if slot is None:
            return Outcome("refused", detail="no room")
        at = 0
        for part in put.parts:
            _copy(slot.view[at : at + part.nbytes], part)
            at += part.nbytes
        slot.publish()
        return Outcome("ok", at)

    def _publish(self, slot: Slot, holder: str | None) -> Lease | None:
        with self._lock:
            entry = self._books.get(slot.key)
            if self._closed or entry is not None:
                self._give_up(slot)
            else:
                offset = self._take_back(slot)
                entry = self._books.add(slot.key, self._slabs.slot_bytes(offset), slot.view.nbytes, offset)
                self._at[offset] = entry
                self._on_event(TierEvent("stored", slot.key))
            if holder is None or entry is None or self._closed:
                return None
            return self._lease_on(entry, holder)

    def _abandon(self, slot: Slot) -> None:
        with self._lock:
            self._give_up(slot)

    def _give_up(self, slot: Slot) -> None:
        self._slabs.free(self._take_back(slot))

    def _take_back(self, slot: Slot) -> int:
        assert slot in self._slots, "a slot was published or abandoned twice"
        offset = self._slots.pop(slot)
        self._books.set_aside(slot.key.owner, -self._slabs.slot_bytes(offset))
        return offset

    def _lease_on(self, entry: Entry, holder: str) -> Lease:
        view, address = self.arena.view(entry.place, entry.length), self.arena.address + entry.place
        lease = Lease(entry.key, view, entry.place, address, holder, self._release)
        self._leases[lease] = entry
        entry.users += 1
        return lease

    def _release(self, lease: Lease) -> None:
        with self._lock:
            assert lease in self._leases, f"a lease of {lease.holder} was released twice"
            entry = self._leases.pop(lease)
            entry.users -= 1
            if not entry.users and self._doomed.get(entry.place) is entry:
                del self._doomed[entry.place]
                self._books.set_aside(entry.key.owner, -entry.size_bytes)
                self._slabs.free(entry.place)

    def _find_room(self, owner: bytes, slot_bytes: int) -> int | None:
        """Return a free slot, after evicting what it takes."""
        limit = self._books.quotas.of(owner)
        if slot_bytes > self._slabs.slab_bytes or (limit is not None and slot_bytes > limit):
            return None
        while self._books.over_quota(owner, slot_bytes):
            entry = self._books.candidate(owner)
            if entry is None:
                return None
            self._evict(entry)
        while (offset := self._slabs.allocate(slot_bytes)) is None:
            entry = self._books.candidate(may=lambda entry: self._makes_room(entry, slot_bytes))
            if entry is None:
                return None
            for one in self._going_with(entry, slot_bytes) or ():
                self._evict(one)
        return offset

    def _makes_room(self, entry: Entry, slot_bytes: int) -> bool:
        going = self._going_with(entry, slot_bytes)
        return going is not None and all(self._books.may_go(one) for one in going)

    def _going_with(self, entry: Entry, slot_bytes: int) -> list[Entry] | None:
        """Return what has to go for a slot of this size: the entry, or all of its slab when that has other slots. None
        where a slot of the slab is being filled, or is read after its object was deleted."""
        if self._slabs.slot_bytes(entry.place) == slot_bytes:
            return [entry]
        offsets = self._slabs.neighbours(entry.place)
        return [self._at[offset] for offset in offsets] if all(one in self._at for one in offsets) else None

    def _evict(self, entry: Entry) -> None:
        self._counters.evicted(entry.size_bytes)
        self._forget(entry, evicted=True)

    def _forget(self, entry: Entry, *, evicted: bool = False) -> None:
        """Take an object out of the books, and free its slot unless it is being read."""
        self._on_event(TierEvent("removed", entry.key))
        self._books.remove(entry.key, evicted=evicted)
        del self._at[entry.place]
        if entry.users:
            self._books.set_aside(entry.key.owner, entry.size_bytes)
            self._doomed[entry.place] = entry
        else:
            self._slabs.free(entry.place)


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes; numpy lets other threads run meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
