"""A set-associative table from 64-bit fingerprints to bit planes, in flat arrays: its memory is known beforehand.

Rows of 8 slots. A fingerprint may stand in one of two rows, which its two halves choose, so a lookup reads two cache
lines and nothing more, and nothing is ever moved. A new one goes to the emptier row; with two choices rows of 8 are
about 95 % full on average before the first one finds both of its rows full. Then the oldest of the 16 slots is reused:
the least recently used fingerprint, but for chance. Everything works on many fingerprints at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

WAYS = 8
Words = NDArray[np.uint64]
Slots = NDArray[np.int64]

EMPTY = np.uint64(0)
HALF = np.uint64(32)
LOW_HALF = np.uint64(0xFFFF_FFFF)


class BlockTable:
    """`planes[p][w, slot]` are 64 bits about the fingerprint in `slot`. A plane takes memory once it is written.

    No fingerprint is 0. `on_evict` gets slots right before they are emptied for others.
    """

    def __init__(self, max_blocks: int, num_planes: int, on_evict: Callable[[Slots], None]) -> None:
        self.count = 0
        self.words = 1
        self.num_rows = max(2, -(-max_blocks // WAYS))
        self.num_slots = self.num_rows * WAYS
        self.prints: Words = np.zeros(self.num_slots, np.uint64)
        self.planes: list[Words | None] = [None] * num_planes
        self._ages: NDArray[np.uint32] = np.zeros(self.num_slots, np.uint32)
        self._rows = self.prints.reshape(self.num_rows, WAYS)
        self._on_evict = on_evict

    @property
    def size_bytes(self) -> int:
        planes = sum(plane.nbytes for plane in self.planes if plane is not None)
        return self.prints.nbytes + self._ages.nbytes + planes

    def plane(self, index: int) -> Words:
        """Return a plane to write to."""
        plane = self.planes[index]
        if plane is None:
            plane = self.planes[index] = np.zeros((self.words, self.num_slots), np.uint64)
        return plane

    def add_word(self) -> None:
        """Make room for 64 more bits about every fingerprint."""
        self.words += 1
        for index, plane in enumerate(self.planes):
            if plane is not None:
                self.planes[index] = np.concatenate((plane, np.zeros((1, self.num_slots), np.uint64)))

    def find(self, prints: Words) -> Slots:
        """Return the slot of each fingerprint, -1 where it is not in the table."""
        first, second = self._choices(prints)
        same = np.concatenate((self._rows.take(first, axis=0), self._rows.take(second, axis=0)), axis=1)
        index, way = (same == prints[:, None]).nonzero()  # one at most for each
        slots = np.full(len(prints), -1, np.int64)
        slots[index] = np.where(way < WAYS, first[index], second[index] - 1) * WAYS + way
        return slots

    def touch(self, slots: Slots, age: int) -> None:
        """Mark as used. Ages never fall."""
        self._ages[slots] = age

    def insert(self, prints: Words, age: int) -> Slots:
        """Return the slots of `prints`, all different; those that were not there are added.

        -1 where there is no room: more of them share two rows than these have slots.
        """
        slots = self.find(prints)
        self._ages[slots[slots >= 0]] = age
        missing = np.flatnonzero(slots < 0)
        while len(missing):
            missing = self._place(prints, slots, missing, age)
        slots[self.prints[slots] != prints] = -1
        return slots

    def _place(self, prints: Words, slots: Slots, missing: Slots, age: int) -> Slots:
        """Give each of the `missing` a slot; return those whose slot another one has got first."""
        wanted = prints[missing]
        candidates = self._candidates(wanted)
        free = self.prints[candidates] == EMPTY
        rank = np.where(free, np.int64(-1), self._ages[candidates].astype(np.int64))
        second_is_emptier = free[:, WAYS:].sum(axis=1) > free[:, :WAYS].sum(axis=1)
        rank[:, WAYS:] -= (free[:, WAYS:] & second_is_emptier[:, None]).astype(np.int64)
        choice = candidates[np.arange(len(missing)), rank.argmin(axis=1)]
        taken, at = np.unique(choice, return_index=True)
        self._empty(taken[self.prints[taken] != EMPTY])
        self.prints[taken] = wanted[at]
        self._ages[taken] = age
        self.count += len(taken)
        slots[missing[at]] = taken
        return np.delete(missing, at)

    def _empty(self, slots: Slots) -> None:
        if len(slots):
            self._on_evict(slots)
            for plane in self.planes:
                if plane is not None:
                    plane[:, slots] = EMPTY
            self.prints[slots] = EMPTY
            self.count -= len(slots)

    def release(self, slots: Slots) -> None:
        """Free those of `slots`, all different and in use, about which no bit is set."""
        self._free(slots[~self._any_bit(slots)])

    def keep_only(self, keep: Words, start: int, end: int) -> None:
        """Clear all bits that are not in `keep`, one entry a word, in the slots from `start` to `end`."""
        for plane in self.planes:
            if plane is not None:
                plane[:, start:end] &= keep[:, None]
        span = np.arange(start, min(end, self.num_slots))
        self.release(span[self.prints[start:end] != EMPTY])

    def _any_bit(self, slots: Slots) -> NDArray[np.bool_]:
        found = np.zeros(len(slots), np.bool_)
        for plane in self.planes:
            if plane is not None:
                found |= (plane[:, slots] != EMPTY).any(axis=0)
        return found

    def _free(self, slots: Slots) -> None:
        self.prints[slots] = EMPTY
        self.count -= len(slots)

    def _candidates(self, prints: Words) -> Slots:
        first, second = self._choices(prints)
        ways = np.arange(WAYS)
        return np.concatenate((first[:, None] * WAYS + ways, second[:, None] * WAYS + ways), axis=1)

    def _choices(self, prints: Words) -> tuple[Slots, Slots]:
        """Return two different rows for each: a half of the print scaled to the number of rows."""
        rows = np.uint64(self.num_rows)
        first = ((prints >> HALF) * rows) >> HALF
        step = (((prints & LOW_HALF) * (rows - np.uint64(1))) >> HALF) + np.uint64(1)
        return first.astype(np.int64), ((first + step) % rows).astype(np.int64)
