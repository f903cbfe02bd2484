"""How much of a prompt the tiers hold: asked of memory first, then of the slower ones for what follows.

A tier that holds one object of a block is taken to hold all of them, and is asked for one alone: what is found is a
hint anyway, and a block that is not whole makes the load shorter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvstore.layout import ObjectLayout
from kvstore.manager.parts import BlockParts
from kvstore.object_key import ObjectKey
from kvstore.ram.tier import RamTier
from kvstore.tier import Deadline, Outcome, Tier, TierName

LOOK_UP_S = 0.05
"""Time for a whole look-up. What is not known by then counts as absent."""


class Look:
    """One look-up of `keys` from block `start` on. `tiers` are those of the leading blocks that were found so far, and
    all there are once it is `done`."""

    def __init__(self, parts: BlockParts, owner: bytes, keys: Sequence[bytes], start: int, deadline: Deadline) -> None:
        self.parts, self.owner, self.keys, self.start = parts, owner, keys, start
        self.deadline = deadline
        self.tiers: list[TierName] = []
        self.done = False
        # Of each block the one object that stands for it.
        self.objects = parts.keys(owner, keys[start:], [(parts.full or parts.sliding)[0]])

    @property
    def end(self) -> int:
        """The block behind what was found so far."""
        return self.start + len(self.tiers)

    @property
    def rest(self) -> Sequence[ObjectKey]:
        """The objects of the blocks behind what was found so far."""
        return self.objects[len(self.tiers) :]

    def keys_of(self, first: int, stop: int, layouts: Sequence[ObjectLayout]) -> list[ObjectKey]:
        return self.parts.keys(self.owner, self.keys[first:stop], layouts)


class Looker:
    """Runs look-ups over the store's tiers: in the caller's thread as far as tiers answer at once, and then in theirs.
    `lower` are those below memory, the fastest first. `on_done` is called at the end, from whichever."""

    def __init__(self, ram: RamTier, lower: Sequence[Tier], on_done: Callable[[Look], None]) -> None:
        self._ram, self._lower, self._on_done = ram, list(lower), on_done

    def begin(self, look: Look) -> None:
        self._in_memory(look)
        self._go_on(look, 0)

    def _in_memory(self, look: Look) -> None:
        look.tiers += ["ram"] * _leading(self._ram, look.rest)

    def _go_on(self, look: Look, index: int) -> None:
        """Ask the tiers from `index` on for what follows, until none has any. Ends where one answers later."""
        while look.rest and index < len(self._lower) and not look.deadline.passed:
            answer = _Answer(self, look, index)
            self._lower[index].probe(look.rest, look.deadline, answer.report)
            found = answer.take()
            if found is None:
                return
            index = self._found(look, index, found)
        self._with_windows(look)

    def _found(self, look: Look, index: int, blocks: int) -> int:
        """Take what a tier has, up to what memory has; return which to ask next."""
        if not blocks:
            return index + 1
        for number, key in enumerate(look.rest[:blocks]):
            if number and self._ram.held(key):
                break
            look.tiers.append(self._lower[index].name)
        self._in_memory(look)
        return 0

    def later(self, look: Look, index: int, blocks: int) -> None:
        """A tier has answered from a thread of its own."""
        self._go_on(look, self._found(look, index, blocks))

    def _with_windows(self, look: Look) -> None:
        """What was found can be used if the blocks that windows see at its end are there too."""
        missing = [
            key
            for layout in look.parts.sliding
            for key in look.keys_of(max(look.start, look.end - look.parts.depths[layout.group]), look.end, [layout])
            if not self._ram.held(key)
        ]
        self._windows_below(look, missing if look.parts.full else [], 0)

    def _windows_below(self, look: Look, missing: Sequence[ObjectKey], index: int) -> None:
        if missing and (index == len(self._lower) or look.deadline.passed):
            look.tiers.clear()
        elif missing:
            self._lower[index].probe(
                missing,
                look.deadline,
                lambda _, outcome: self._windows_below(look, missing[outcome.size_bytes :], index + 1),
            )
            return
        look.done = True
        self._on_done(look)


class _Answer:
    """A tier's answer, which may come before the call returns, or later in another thread: whoever is second goes on
    with the look-up."""

    def __init__(self, looker: Looker, look: Look, index: int) -> None:
        self._looker, self._look, self._index = looker, look, index
        self._lock = threading.Lock()
        self._blocks: int | None = None
        self._is_late = False

    def report(self, _: int, outcome: Outcome) -> None:
        with self._lock:
            self._blocks = outcome.size_bytes
            late = self._is_late
        if late:
            self._looker.later(self._look, self._index, self._blocks)

    def take(self) -> int | None:
        """Return the answer; None says that it will come to `Looker.later`."""
        with self._lock:
            self._is_late = self._blocks is None
            return self._blocks


def _leading(ram: RamTier, keys: Sequence[ObjectKey]) -> int:
    found: list[int] = []
    ram.probe(keys, Deadline.after(1.0), lambda _, outcome: found.append(outcome.size_bytes))
    return found[0]
