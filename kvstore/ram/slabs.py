"""Where objects lie in an arena: slabs of one size, each cut into slots of one size class.

Knows offsets and sizes, no memory and no keys. A slab whose slots are all free belongs to no class again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PAGE_BYTES = 4096


def class_bytes(size_bytes: int) -> int:
    """Return the slot size for an object: whole pages, and in steps of a sixteenth of the power of two below it."""
    step = max(PAGE_BYTES, (1 << (size_bytes - 1).bit_length()) // 32)
    return -(-size_bytes // step) * step


@dataclass(slots=True)
class _Slab:
    slot_bytes: int = 0
    used: set[int] = field(default_factory=set)
    free: list[int] = field(default_factory=list)


class Slabs:
    """Offsets are multiples of a page. Bytes behind the last whole slab are not used."""

    def __init__(self, capacity_bytes: int, slab_bytes: int) -> None:
        if slab_bytes % PAGE_BYTES or not 0 < slab_bytes <= capacity_bytes:
            raise ValueError(f"slabs of {slab_bytes} bytes do not fit into {capacity_bytes} bytes by whole pages")
        self.slab_bytes = slab_bytes
        self._slabs = [_Slab() for _ in range(capacity_bytes // slab_bytes)]
        self._unused = list(range(len(self._slabs)))[::-1]
        # Slabs of a class that have a free slot, in the order in which they got one.
        self._open: dict[int, dict[int, None]] = {}

    def allocate(self, slot_bytes: int) -> int | None:
        """Return the offset of a free slot of a size class, None when there is none."""
        open_slabs = self._open.setdefault(slot_bytes, {})
        if not open_slabs:
            if not self._unused or slot_bytes > self.slab_bytes:
                return None
            number = self._unused.pop()
            start = number * self.slab_bytes
            free = list(range(start, start + self.slab_bytes - slot_bytes + 1, slot_bytes))[::-1]
            self._slabs[number] = _Slab(slot_bytes, set(), free)
            open_slabs[number] = None
        number = next(iter(open_slabs))
        slab = self._slabs[number]
        offset = slab.free.pop()
        slab.used.add(offset)
        if not slab.free:
            del open_slabs[number]
        return offset

    def free(self, offset: int) -> None:
        number = offset // self.slab_bytes
        slab = self._slabs[number]
        slab.used.remove(offset)
        slab.free.append(offset)
        if slab.used:
            self._open[slab.slot_bytes][number] = None
            return
        self._open[slab.slot_bytes].pop(number, None)
        self._slabs[number] = _Slab()
        self._unused.append(number)

    def slot_bytes(self, offset: int) -> int:
        """Return the size class of the slab that a slot lies in."""
        return self._slabs[offset // self.slab_bytes].slot_bytes

    def neighbours(self, offset: int) -> Sequence[int]:
        """Return the offsets of all used slots of a slot's slab, its own among them."""
        return list(self._slabs[offset // self.slab_bytes].used)

    def check_integrity(self, used: Mapping[int, int]) -> None:
        """Raise AssertionError unless `used` (offset -> object bytes) are exactly the used slots, and none overlap."""
        assert {offset for slab in self._slabs for offset in slab.used} == set(used), "used slots differ"
        for number, slab in enumerate(self._slabs):
            start = number * self.slab_bytes
            slots = sorted([*slab.used, *slab.free])
            assert (number in self._unused) == (not slab.used), f"slab {number} is lost"
            assert (number in self._open.get(slab.slot_bytes, {})) == bool(slab.used and slab.free), "not listed right"
            if not slab.used:
                assert slab == _Slab(), f"slab {number} is unused and has slots"
                continue
            whole = range(start, start + self.slab_bytes - slab.slot_bytes + 1, slab.slot_bytes)
            assert slots == list(whole), f"slots of slab {number} are lost or overlap"
            assert all(used[offset] <= slab.slot_bytes for offset in slab.used), "an object is larger than its slot"
