"""What the disk tier knows of its objects, for callers who must not wait for the disk.

Three answers: held, absent, and unknown, as long as the directory has not been walked or where others write to it too.
What is to be deleted is absent from that moment on, and cannot be stored again before its file is gone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal

from kvstore.books import Books, Entry
from kvstore.disk.place import FoundObject
from kvstore.object_key import ObjectKey
from kvstore.tier import Deadline, EventSink, TierEvent

Known = Literal["held", "absent", "unknown"]
Selection = tuple[bytes | None, bytes | None]
"""Namespace and owner of a drop; None is all of them."""


class HeldObjects:
    """`capacity_bytes` is physical. `evicts` says whether this process may delete to make room; `shared` that others
    write to the directory too."""

    def __init__(
        self, books: Books, capacity_bytes: int, on_event: EventSink, *, shared: bool = False, evicts: bool = True
    ) -> None:
        self.shared, self.evicts = shared, evicts
        self.indexed = False
        self.drops = 0
        """How many drops there were: an object whose save began before the last one is not stored."""
        self._books, self._capacity_bytes, self._on_event = books, capacity_bytes, on_event
        self._changed = threading.Condition()
        self._going: set[ObjectKey] = set()
        self._deletions: deque[ObjectKey] = deque()
        self._selections: list[Selection] = []
        # What went while a walk was under way, which may have seen it before.
        self._walking = False
        self._gone: set[ObjectKey] = set()
        self._gone_selections: list[Selection] = []

    def look(self, key: ObjectKey) -> Known:
        with self._changed:
            if self._hidden(key):
                return "absent"
            if self._books.get(key) is not None:
                return "held"
            return "absent" if self.indexed and not self.shared else "unknown"

    def used(self, key: ObjectKey) -> None:
        with self._changed:
            if (entry := self._books.get(key)) is not None:
                self._books.use(entry)

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        with self._changed:
            self._books.touch(keys)

    def pin(self, keys: Sequence[ObjectKey], seconds: float) -> int:
        with self._changed:
            return self._books.pin(keys, seconds)

    def set_quota(self, owner: bytes, limit_bytes: int | None) -> None:
        with self._changed:
            self._books.set_quota(owner, limit_bytes)

    def totals(self) -> tuple[int, int, int]:
        """Return the number of objects, the bytes they take, and the bytes that are pinned."""
        with self._changed:
            return len(self._books), self._books.used_bytes, self._books.pinned_bytes

    def owners(self) -> list[tuple[bytes, int, int | None]]:
        with self._changed:
            return self._books.owners()

    # Saving

    def wait_settled(self, key: ObjectKey, deadline: Deadline) -> bool:
        """Wait until a file of this key that is to be deleted is gone; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._hidden(key), deadline.left_s)

    def reserve(self, owner: bytes, size_bytes: int, *, lacking: bool) -> bool | Entry:
        """Set space aside and return True, or return False when there cannot be enough. Otherwise return an object
        that has to go first: it is absent now, and `settled` or `stays` follows.

        `lacking` says that the disk itself has too little.
        """
        with self._changed:
            limit = self._books.quotas.of(owner)
            if size_bytes > self._capacity_bytes or (limit is not None and size_bytes > limit):
                return False
            if self._books.over_quota(owner, size_bytes):
                entry = self._books.candidate(owner)
            elif lacking or self._books.used_bytes + size_bytes > self._capacity_bytes:
                entry = self._books.candidate()
            else:
                self._books.set_aside(owner, size_bytes)
                return True
            if entry is None or not self.evicts:
                return False
            self._go(entry, evicted=True)
            return entry

    def excess(self, *, lacking: bool) -> Entry | None:
        """Return an object that has to go because there is too little space, as `reserve` does; None when there is
        enough."""
        with self._changed:
            too_much = lacking or self._books.used_bytes > self._capacity_bytes
            entry = self._books.candidate() if too_much and self.evicts else None
            if entry is not None:
                self._go(entry, evicted=True)
            return entry

    def give_up(self, owner: bytes, size_bytes: int) -> None:
        """Return space that was set aside."""
        with self._changed:
            self._books.set_aside(owner, -size_bytes)

    def stored(self, key: ObjectKey, size_bytes: int, length: int, *, reserved_bytes: int, drops: int) -> bool:
        """Enter an object whose file is in its place, instead of the space that was set aside for it; False when it was
        dropped meanwhile, and is to be deleted."""
        with self._changed:
            self._books.set_aside(key.owner, -reserved_bytes)
            if drops != self.drops:
                return False
            if self._books.get(key) is not None:
                self._books.remove(key)
            self._books.add(key, size_bytes, length)
            self._on_event(TierEvent("stored", key))
            return True

    # What goes

    def missing(self, key: ObjectKey) -> None:
        """The file is not there, whoever took it."""
        with self._changed:
            self._note_gone(key)
            if (entry := self._books.get(key)) is not None:
                self._on_event(TierEvent("removed", key))
                self._books.remove(entry.key)

    def condemn(self, key: ObjectKey) -> None:
        """The object is to be deleted by the caller; `settled` follows."""
        with self._changed:
            if (entry := self._books.get(key)) is not None:
                self._go(entry, evicted=False)
            self._going.add(key)

    def settled(self, key: ObjectKey) -> None:
        """The file is gone."""
        with self._changed:
            self._going.discard(key)
            self._note_gone(key)
            self._changed.notify_all()

    def stays(self, entry: Entry, *, undeletable: bool) -> None:
        """The file could not be deleted: it takes space as before, and is not tried again if it is `undeletable`."""
        with self._changed:
            self._going.discard(entry.key)
            if self._books.get(entry.key) is None and not self._hidden(entry.key):
                again = self._books.add(entry.key, entry.size_bytes, entry.length)
                again.users += undeletable
                self._on_event(TierEvent("stored", entry.key))
            self._changed.notify_all()

    def delete(self, keys: Iterable[ObjectKey]) -> None:
        """Leave deletions to the sweeper."""
        with self._changed:
            for key in keys:
                if key in self._going:
                    continue
                if (entry := self._books.get(key)) is not None:
                    self._go(entry, evicted=False)
                self._going.add(key)
                self._deletions.append(key)

    def delete_again(self, keys: Iterable[ObjectKey]) -> None:
        """Leave deletions that failed to the sweeper once more."""
        with self._changed:
            self._deletions.extend(key for key in keys if key in self._going)

    def drop(self, namespace: bytes | None, owner: bytes | None) -> None:
        """Leave the deletion of directories to the sweeper."""
        with self._changed:
            self.drops += 1
            self._selections.append((namespace, owner))
            selected = set(self._books.select(namespace, owner))
            for entry in [entry for entry in self._books if entry.key in selected]:
                self._on_event(TierEvent("removed", entry.key))
                self._books.remove(entry.key)

    def next_deletion(self) -> ObjectKey | None:
        """Return a key that waits for its deletion; `settled` follows when it is done."""
        with self._changed:
            return self._deletions.popleft() if self._deletions else None

    def next_drop(self) -> Selection | None:
        """Return the oldest drop that waits; `dropped` follows when it is done."""
        with self._changed:
            return self._selections[0] if self._selections else None

    def dropped(self) -> None:
        with self._changed:
            selection = self._selections.pop(0)
            if self._walking:
                self._gone_selections.append(selection)
            self._changed.notify_all()

    # The walk

    def walk_begins(self) -> None:
        with self._changed:
            self._walking = True

    def add_found(self, found: Iterable[FoundObject]) -> None:
        """Enter what a walk found as older than all else, the newest first."""
        with self._changed:
            for one in found:
                key = one.key
                known = self._books.get(key) is not None or self._hidden(key)
                if not known and key not in self._gone and not _selected(key, self._gone_selections):
                    self._books.add(key, one.size_bytes, one.length, oldest=True)
                    self._on_event(TierEvent("stored", key))

    def walk_ends(self, *, complete: bool) -> None:
        with self._changed:
            self._walking = False
            self._gone.clear()
            self._gone_selections.clear()
            self.indexed = self.indexed or complete

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books are right and nothing is half done."""
        with self._changed:
            assert not self._deletions, "deletions are left"
            assert not self._selections, "drops are left"
            self._books.check_integrity()

    def _go(self, entry: Entry, *, evicted: bool) -> None:
        self._on_event(TierEvent("removed", entry.key))
        self._books.remove(entry.key, evicted=evicted)
        self._going.add(entry.key)

    def _note_gone(self, key: ObjectKey) -> None:
        if self._walking:
            self._gone.add(key)

    def _hidden(self, key: ObjectKey) -> bool:
        return key in self._going or _selected(key, self._selections)


def _selected(key: ObjectKey, selections: Sequence[Selection]) -> bool:
    return any(namespace in (None, key.namespace) and owner in (None, key.owner) for namespace, owner in selections)
