"""Which bit of the index's planes belongs to which target, and which bits hold what nobody means any more.

Dropping or clearing a target only retires its bit: O(1). Retired bits stand in the planes until a sweep has gone
through them, a piece with every change; only then are they given out again.
"""

from __future__ import annotations

from collections.abc import KeysView

import numpy as np

from router.block_table import BlockTable, Words

WORD_BITS = 64
SWEEP_SLOTS = 16_384
"""About 50 us for each plane and word."""


class TargetBits:
    """`live` has the bits of all targets, one entry a word. `names[bit]` is the target's id where the bit is live."""

    def __init__(self, table: BlockTable) -> None:
        self.names: list[str] = [""] * WORD_BITS
        self.live: Words = np.zeros(1, np.uint64)
        self._table = table
        self._bits: dict[str, int] = {}
        self._free = list(range(WORD_BITS - 1, -1, -1))
        self._retired: list[int] = []
        self._swept: list[int] = []
        self._position = 0

    def __contains__(self, target_id: str) -> bool:
        return target_id in self._bits

    def __len__(self) -> int:
        return len(self._bits)

    @property
    def names_in_use(self) -> KeysView[str]:
        return self._bits.keys()

    def get(self, target_id: str) -> int | None:
        return self._bits.get(target_id)

    def add(self, target_id: str) -> int:
        """Give a new target a bit."""
        if not self._free and (self._retired or self._swept):
            while not self._free:
                self.sweep()
        if not self._free:
            self._table.add_word()
            first = len(self.names)
            self.names += [""] * WORD_BITS
            self.live = np.append(self.live, np.uint64(0))
            self._free = list(range(first + WORD_BITS - 1, first - 1, -1))
        bit = self._free.pop()
        self._bits[target_id] = bit
        self.names[bit] = target_id
        self.live[bit // WORD_BITS] |= mask_of(bit)
        return bit

    def retire(self, target_id: str) -> int | None:
        """Take a target's bit away; return it, None if there is no such target."""
        bit = self._bits.pop(target_id, None)
        if bit is not None:
            self.live[bit // WORD_BITS] &= ~mask_of(bit)
            self._retired.append(bit)
        return bit

    def sweep(self) -> None:
        """Clear retired bits in the next piece of the planes."""
        if not self._swept:
            if not self._retired:
                return
            self._swept, self._retired, self._position = self._retired, [], 0
        keep = np.full(len(self.live), ~np.uint64(0))
        for bit in self._swept:
            keep[bit // WORD_BITS] &= ~mask_of(bit)
        end = self._position + SWEEP_SLOTS
        self._table.keep_only(keep, self._position, end)
        self._position = end
        if end >= self._table.num_slots:
            self._free += self._swept
            self._swept = []


def mask_of(bit: int) -> np.uint64:
    """Return the bit's mask in its word."""
    return np.uint64(plain_mask_of(bit))


def plain_mask_of(bit: int) -> int:
    """The same as a number of Python's, for what is done one by one."""
    return 1 << bit % WORD_BITS
