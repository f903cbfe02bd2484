"""A set-associative table from 64-bit fingerprints to bit planes, in flat arrays: its memory is known beforehand.

Rows of 8 slots. A fingerprint may stand in one of two rows, which its two halves choose, so a lookup reads two cache
lines and nothing more, and nothing is ever moved. A new one goes to the emptier row: so rows fill evenly, and up to
75 % hardly any finds both of its rows full (two choices, Azar et al. 1994). One that does takes the oldest of the 16:
the least recently used fingerprint, but for chance. Most works on many fingerprints at a time, and costs as much for
one: `find_one` and its like are for a few.
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

    def __init__(self, num_slots: int, num_planes: int, on_evict: Callable[[Slots], None]) -> None:
        self.count = 0
        self.words = 1
        self.num_rows = max(2, -(-num_slots // WAYS))
        self.num_slots = self.num_rows * WAYS
        self.prints: Words = np.zeros(self.num_slots, np.uint64)
        self.planes: list[Words | None] = [None] * num_planes
        self._ages: NDArray[np.uint32] = np.zeros(self.num_slots, np.uint32)
        self._rows = self.prints.reshape(self.num_rows, WAYS)
        # The same memory for single reads and writes, which cost numpy ten times as much.
        self._print_view, self._age_view = self.prints.data, self._ages.data
        self._views: list[list[memoryview]] = [[] for _ in self.planes]
        self._on_evict = on_evict

    @property
    def size_bytes(self) -> int:
        planes = sum(plane.nbytes for plane in self.planes if plane is not None)
        return self.prints.nbytes + self._ages.nbytes + planes

    def plane(self, index: int) -> Words:
        """Return a plane to write to."""
        plane = self.planes[index]
        if plane is None:
            plane = np.zeros((self.words, self.num_slots), np.uint64)
            self._set_plane(index, plane)
        return plane

    def view(self, index: int, word: int) -> memoryview:
        """Return one word of a plane, to read and write single slots."""
        self.plane(index)
        return self._views[index][word]

    def _set_plane(self, index: int, plane: Words) -> None:
        self.planes[index] = plane
        self._views[index] = [word.data for word in plane]

    def add_word(self) -> None:
        """Make room for 64 more bits about every fingerprint."""
        self.words += 1
        for index, plane in enumerate(self.planes):
            if plane is not None:
                self._set_plane(index, np.concatenate((plane, np.zeros((1, self.num_slots), np.uint64))))

    def find(self, prints: Words) -> Slots:
        """Return the slot of each fingerprint, -1 where it is not in the table."""
        first, second = self._choices(prints)
        same = np.concatenate((self._rows.take(first, axis=0), self._rows.take(second, axis=0)), axis=1)
        index, way = (same == prints[:, None]).nonzero()  # one at most for each
        slots = np.full(len(prints), -1, np.int64)
        slots[index] = np.where(way < WAYS, first[index], second[index] - 1) * WAYS + way
        return slots

    def find_one(self, one: int) -> int:
        """Return the slot of a fingerprint, -1 if it is not in the table."""
        for row in self._choose(one):
            prints = self._print_view[row * WAYS : row * WAYS + WAYS].tolist()
            if one in prints:
                return row * WAYS + int(prints.index(one))
        return -1

    def insert_one(self, one: int, age: int) -> int:
        """Return the slot of a fingerprint, which is added if it was not there."""
        first, second = self._choose(one)
        starts = (first * WAYS, second * WAYS)
        rows = [self._print_view[start : start + WAYS].tolist() for start in starts]
        if one in rows[0]:
            slot = starts[0] + int(rows[0].index(one))
        elif one in rows[1]:
            slot = starts[1] + int(rows[1].index(one))
        else:
            slot = self._best_slot(starts, rows)
            if self._print_view[slot]:
                self._empty(np.array([slot]))
            self._print_view[slot] = one
            self.count += 1
        self._age_view[slot] = age
        return slot

    def touch_one(self, slot: int, age: int) -> None:
        """`touch` one slot."""
        self._age_view[slot] = age

    def release_one(self, slot: int) -> None:
        """Free a slot in use if no bit is set about its fingerprint."""
        for views in self._views:
            for view in views:
                if view[slot]:
                    return
        self._print_view[slot] = 0
        self.count -= 1

    def _best_slot(self, starts: tuple[int, int], rows: list[list[int]]) -> int:
        """Return a free slot of the emptier of two rows, or the oldest one of both."""
        emptier = int(rows[1].count(0) > rows[0].count(0))
        if 0 in rows[emptier]:
            return starts[emptier] + int(rows[emptier].index(0))
        ages = [self._age_view[start : start + WAYS].tolist() for start in starts]
        older = int(min(ages[1]) < min(ages[0]))
        return starts[older] + int(ages[older].index(min(ages[older])))

    def _choose(self, one: int) -> tuple[int, int]:
        """`_choices` of one."""
        first = (one >> 32) * self.num_rows >> 32
        return first, (first + 1 + ((one & 0xFFFF_FFFF) * (self.num_rows - 1) >> 32)) % self.num_rows

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
