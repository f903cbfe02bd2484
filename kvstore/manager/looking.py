"""How much of a prompt the tiers hold: asked of memory first, then of the slower ones for what follows."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvstore.layout import ObjectLayout
from kvstore.manager.parts import BlockParts
from kvstore.object_key import ObjectKey
from kvstore.ram.tier import RamTier
from kvstore.tier import Deadline, Outcome, Tier, TierName

LOOK_UP_S = 0.05
"""Time for a whole look-up. What is not known by then counts as absent."""


class Look:
    """One look-up of `keys` from block `start` on. `tiers` are those of the leading blocks that were found so far, and
    all there are once it is `done`. Its steps run in the looker's thread."""

    def __init__(self, parts: BlockParts, owner: bytes, keys: Sequence[bytes], start: int, deadline: Deadline) -> None:
        self.parts, self.owner, self.keys, self.start = parts, owner, keys, start
        self.deadline = deadline
        self.tiers: list[TierName] = []
        self.done = False

    @property
    def end(self) -> int:
        """The block behind what was found so far."""
        return self.start + len(self.tiers)

    def objects(self, first: int, stop: int, layouts: Sequence[ObjectLayout]) -> list[ObjectKey]:
        return self.parts.keys(self.owner, self.keys[first:stop], layouts)


class Looker:
    """Runs look-ups over the store's tiers. `lower` are those below memory, the fastest first."""

    def __init__(self, ram: RamTier, lower: Sequence[Tier], on_done: Callable[[Look], None]) -> None:
        self._ram, self._lower, self._on_done = ram, list(lower), on_done
        self._steps: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-look", daemon=True)
        self._thread.start()

    def begin(self, look: Look) -> None:
        self._steps.put(partial(self._in_memory, look))

    def close(self, deadline: Deadline) -> None:
        self._steps.put(None)
        self._thread.join(deadline.left_s + 1.0)

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            step()

    def _in_memory(self, look: Look) -> None:
        """Go on with what memory holds, then ask below for what follows."""
        full = look.parts.full or look.parts.sliding
        keys = look.objects(look.end, len(look.keys), full)
        look.tiers += ["ram"] * (self._leading_in_memory(keys) // len(full))
        if look.end == len(look.keys):
            self._with_windows(look)
        else:
            self._below(look, 0)

    def _below(self, look: Look, index: int) -> None:
        if index == len(self._lower) or look.deadline.passed:
            self._with_windows(look)
            return
        tier, full = self._lower[index], look.parts.full or look.parts.sliding

        def report(_: int, outcome: Outcome) -> None:
            blocks = outcome.size_bytes // len(full)
            self._steps.put(partial(self._found_below, look, index, blocks))

        tier.probe(look.objects(look.end, len(look.keys), full), look.deadline, report)

    def _found_below(self, look: Look, index: int, blocks: int) -> None:
        full = look.parts.full or look.parts.sliding
        for number in range(blocks):
            if number and self._ram.held(look.objects(look.end, look.end + 1, full)[0]):
                break  # memory goes on from here
            look.tiers.append(self._lower[index].name)
        if not blocks:
            self._below(look, index + 1)
        elif look.end == len(look.keys):
            self._with_windows(look)
        else:
            self._in_memory(look)

    def _with_windows(self, look: Look) -> None:
        """What was found can be used if the blocks that windows see at its end are there too."""
        missing = [
            key
            for layout in look.parts.sliding
            for key in look.objects(max(look.start, look.end - look.parts.depths[layout.group]), look.end, [layout])
            if not self._ram.held(key)
        ]
        if missing and look.parts.full:
            self._windows_below(look, missing, 0)
        else:
            self._end(look)

    def _windows_below(self, look: Look, missing: Sequence[ObjectKey], index: int) -> None:
        if index == len(self._lower) or look.deadline.passed:
            look.tiers.clear()
            self._end(look)
            return

        def report(_: int, outcome: Outcome) -> None:
            self._steps.put(partial(self._found_windows, look, missing[outcome.size_bytes :], index))

        self._lower[index].probe(missing, look.deadline, report)

    def _found_windows(self, look: Look, missing: Sequence[ObjectKey], index: int) -> None:
        if missing:
            self._windows_below(look, missing, index + 1)
        else:
            self._end(look)

    def _leading_in_memory(self, keys: Sequence[ObjectKey]) -> int:
        found: list[int] = []
        self._ram.probe(keys, Deadline.after(1.0), lambda _, outcome: found.append(outcome.size_bytes))
        return found[0]

    def _end(self, look: Look) -> None:
        look.done = True
        self._on_done(look)
