"""Behind which blocks of known prefixes the sliding windows can go on.

An end needs, in every sliding group, the blocks that its window sees: so many before and including it. What is counted
for each end is how many of them are missing. Knows keys and groups, no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.kv.blocks import BlockEvent

Seen = tuple[int, bytes]
"""A block in a sliding group."""


class WindowEnds:
    """`on_change(key, is_end)` hears when a block becomes an end, and when it is one no more. `clear` is not told."""

    def __init__(
        self, windows: Sequence[int | None], block_size: int, on_change: Callable[[bytes, bool], None]
    ) -> None:
        # Behind block i the next token sees at most ceil(window / block_size) blocks; the last of them again, when it
        # is recomputed for its logits.
        self._depths = {group: -(-window // block_size) for group, window in enumerate(windows) if window is not None}
        self._on_change = on_change
        self._held: set[Seen] = set()
        self._missing: dict[bytes, int] = {}
        self._sees: dict[bytes, list[Seen]] = {}
        self._seen_by: dict[Seen, dict[bytes, None]] = {}

    def add(self, keys: Sequence[bytes], index: int) -> None:
        """Block `index` of a sequence with these keys is known from now on."""
        key = keys[index]
        sees = [
            (group, seen)
            for group, depth in self._depths.items()
            for seen in keys[max(0, index + 1 - depth) : index + 1]
        ]
        for one in sees:
            self._seen_by.setdefault(one, {})[key] = None
        self._sees[key] = sees
        self._missing[key] = sum(one not in self._held for one in sees)
        if not self._missing[key]:
            self._on_change(key, True)

    def remove(self, key: bytes) -> None:
        """The block is known no more."""
        for one in self._sees.pop(key):
            ends = self._seen_by[one]
            del ends[key]
            if not ends:
                del self._seen_by[one]
        if not self._missing.pop(key):
            self._on_change(key, False)

    def on_block(self, group: int, event: BlockEvent) -> None:
        """A sliding group has stored or removed a block."""
        one = (group, event.key)
        if event.kind == "stored":
            self._held.add(one)
            for key in self._seen_by.get(one, ()):
                self._missing[key] -= 1
                if not self._missing[key]:
                    self._on_change(key, True)
        elif one in self._held:
            self._held.remove(one)
            for key in self._seen_by.get(one, ()):
                self._missing[key] += 1
                if self._missing[key] == 1:
                    self._on_change(key, False)

    def clear(self) -> None:
        """Nothing is known, and no group has anything."""
        for books in (self._held, self._missing, self._sees, self._seen_by):
            books.clear()
