"""What this process knows to be gone before the server does, and which epoch's names it uses.

Deleted objects and dropped namespaces are misses from the call on; the server is told by the upkeep's thread. Until it
knows, nothing of the kind is looked up, and what is saved waits for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping

from kvstore.object_key import ObjectKey
from kvstore.remote.names import Selection, epoch_of, field_of, name_frame, selected
from kvstore.tier import Deadline, EventSink, TierEvent

MAX_DELETIONS = 65_536
"""More than so many at once become drops of whole owners in whole namespaces: memory stays bounded while a server is
away."""

MAX_FRAMES = 10_000
ALL = field_of((None, None))


class Forgotten:
    def __init__(self, on_event: EventSink) -> None:
        self._on_event = on_event
        self._changed = threading.Condition()
        self._epochs: Mapping[bytes, int] | None = None
        # What the names of a namespace's and owner's objects have in common, as far as they were asked for.
        self._frames: dict[tuple[bytes, bytes], tuple[str, str]] = {}
        self._going: set[ObjectKey] = set()
        self._deletions: deque[ObjectKey] = deque()
        self._selections: list[Selection] = []

    @property
    def knows_epochs(self) -> bool:
        return self._epochs is not None

    # Names

    def name(self, key: ObjectKey) -> bytes | None:
        """Return what the object is called at the server, None when it is forgotten."""
        with self._changed:
            return self._name(key)

    def names(self, keys: Iterable[ObjectKey]) -> list[bytes]:
        """Return the names of the leading keys, up to one that is forgotten."""
        with self._changed:
            if self._epochs is not None and not self._going and not self._selections:
                return self._current_names(keys)
            found = []
            for key in keys:
                name = self._name(key)
                if name is None:
                    break
                found.append(name)
            return found

    def wait_name(self, key: ObjectKey, deadline: Deadline) -> bytes | None:
        """Return the name once the server knows that an earlier object of the key is gone, None at the deadline."""
        with self._changed:
            self._changed.wait_for(lambda: self._name(key) is not None, deadline.left_s)
            return self._name(key)

    def is_current(self, key: ObjectKey, epoch: int) -> bool:
        """Whether an object of this epoch can still be found by anybody. True while that is not known."""
        with self._changed:
            if any(selected(key, selection) for selection in self._selections):
                return False
            return self._epochs is None or epoch == epoch_of(key, self._epochs)

    # Forgetting

    def stored(self, key: ObjectKey, name: bytes) -> bool:
        """The server has an object under `name`. False when that is no longer its name: it was dropped meanwhile."""
        with self._changed:
            if key in self._going:
                return True
            if self._name(key) != name:
                return False
            self._on_event(TierEvent("stored", key))
            return True

    def missing(self, key: ObjectKey) -> None:
        """The server does not have it."""
        with self._changed:
            self._on_event(TierEvent("removed", key))

    def delete(self, keys: Iterable[ObjectKey]) -> None:
        with self._changed:
            for key in keys:
                self._on_event(TierEvent("removed", key))
                if key in self._going:
                    continue
                if len(self._going) < MAX_DELETIONS:
                    self._going.add(key)
                    self._deletions.append(key)
                elif (key.namespace, key.owner) not in self._selections:
                    self._selections.append((key.namespace, key.owner))

    def drop(self, selection: Selection) -> None:
        with self._changed:
            if selection == (None, None):
                self._on_event(TierEvent("cleared"))
            if selection not in self._selections:
                self._selections.append(selection)

    # What the server is told

    def next_deletions(self, count: int) -> list[tuple[ObjectKey, bytes]]:
        """Return keys that wait for their deletion, with their names: `deleted` follows, or `delete_again`."""
        with self._changed:
            keys = [self._deletions.popleft() for _ in range(min(count, len(self._deletions)))]
            return list(zip(keys, self._current_names(keys), strict=True))

    def deleted(self, keys: Iterable[ObjectKey]) -> None:
        with self._changed:
            self._going.difference_update(keys)
            self._changed.notify_all()

    def delete_again(self, keys: Iterable[ObjectKey]) -> None:
        with self._changed:
            self._deletions.extend(keys)

    def next_drop(self) -> Selection | None:
        """Return the oldest drop that waits: `dropped` follows when it is done."""
        with self._changed:
            return self._selections[0] if self._selections else None

    def dropped(self, selection: Selection, epochs: Mapping[bytes, int] | None) -> None:
        """The drop is done; `epochs` are those from now on, None when they are as before."""
        with self._changed:
            if epochs is not None:
                self._replace(epochs)
            self._selections.remove(selection)
            self._changed.notify_all()

    def learn(self, epochs: Mapping[bytes, int]) -> None:
        """These are the server's epochs now, perhaps because another process dropped something."""
        with self._changed:
            if self._epochs is not None and self._epochs.get(ALL) != epochs.get(ALL):
                self._on_event(TierEvent("cleared"))
            self._replace(epochs)
            self._changed.notify_all()

    def _replace(self, epochs: Mapping[bytes, int]) -> None:
        self._epochs = epochs
        self._frames.clear()

    def _current_names(self, keys: Iterable[ObjectKey]) -> list[bytes]:
        """Return what `server_name` does, for hundreds of keys that mostly are of one place."""
        found, namespace, owner, front, back = [], b"", b"", "", ""
        for key in keys:
            if key.namespace is not namespace or key.owner is not owner:
                namespace, owner = key.namespace, key.owner
                front, back = self._frame(key)
            found.append(f"{front}{key.leaf}{back}")
        return "\n".join(found).encode().split()  # all at once: that is faster by half

    def _frame(self, key: ObjectKey) -> tuple[str, str]:
        place = (key.namespace, key.owner)
        frame = self._frames.get(place)
        if frame is None:
            if len(self._frames) == MAX_FRAMES:
                self._frames.clear()
            frame = self._frames[place] = name_frame(key, epoch_of(key, self._epochs or {}))
        return frame

    def _name(self, key: ObjectKey) -> bytes | None:
        if self._epochs is None or key in self._going:
            return None
        if self._selections and any(selected(key, selection) for selection in self._selections):
            return None
        return self._current_names((key,))[0]
