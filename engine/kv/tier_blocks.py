"""Which whole blocks the store's tiers hold, as far as this process has heard: what is told to routers.

A block is cut into objects, and is there when all of them are. Hears the tiers from any thread, under their locks; the
engine's loop takes what has changed. Knows no events as they travel.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from kvstore.keys import KEY_BYTES
from kvstore.manager.parts import BlockParts
from kvstore.tier import TierEvent, TierName

MAX_BLOCKS = 262_144
"""In each tier. A server does not tell what it evicts: beyond this the first ones are taken to be gone."""

Changes = Mapping[TierName, Mapping[bytes, bool]]


class TierBlocks:
    """Blocks of one namespace, that of `parts`. Nothing is collected before `enable`."""

    def __init__(self, parts: BlockParts, max_blocks: int = MAX_BLOCKS) -> None:
        self._lock = threading.Lock()
        self._max_blocks = max_blocks
        self._enabled = False
        # By tier and block, a bit for each of its objects that is there, and whose it is.
        self._objects: dict[TierName, dict[bytes, tuple[int, bytes]]] = {}
        self._changes: dict[TierName, dict[bytes, bool]] = {}
        self._use(parts)

    def enable(self) -> None:
        """Collect changes from now on, the first of which are all blocks that are there."""
        with self._lock:
            self._enabled = True
            for tier, blocks in self._objects.items():
                for block, (bits, _) in blocks.items():
                    if bits == self._whole:
                        self._note(tier, block, True)

    def drop(self, owner: bytes, only: TierName | None = None) -> None:
        """What an owner has is gone, in all tiers or in one. Tiers tell of each object, but for a server, which is not
        asked what it had."""
        with self._lock:
            for tier, blocks in self._objects.items():
                if only in (None, tier):
                    for block in [block for block, (_, whose) in blocks.items() if whose == owner]:
                        if blocks.pop(block)[0] == self._whole:
                            self._note(tier, block, False)

    def use_namespace(self, parts: BlockParts) -> None:
        """Blocks of before are of no use any more."""
        with self._lock:
            for tier in list(self._objects):
                self._clear(tier)
            self._use(parts)

    def hear(self, tier: TierName, event: TierEvent) -> None:
        """A `TierSink`."""
        with self._lock:
            key = event.key
            if key is None:
                self._clear(tier)
                return
            bit = self._bits.get((key.group, key.layer_start, key.head_start))
            if bit is None or key.namespace != self._digest or len(key.block) != KEY_BYTES:
                return
            blocks = self._objects.setdefault(tier, {})
            before = blocks[key.block][0] if key.block in blocks else 0
            after = before | bit if event.kind == "stored" else before & ~bit
            if after:
                blocks[key.block] = (after, key.owner)
            else:
                blocks.pop(key.block, None)
            if (before == self._whole) != (after == self._whole):
                self._note(tier, key.block, after == self._whole)
            if len(blocks) > self._max_blocks:
                first = next(iter(blocks))
                if blocks.pop(first)[0] == self._whole:
                    self._note(tier, first, False)

    def take(self) -> Changes:
        """Return what has changed since the last call: by tier, blocks that are there (True) or gone."""
        with self._lock:
            changes, self._changes = self._changes, {}
        return changes

    def _use(self, parts: BlockParts) -> None:
        self._digest = parts.digest
        layouts = parts.full or parts.sliding
        self._bits = {(one.group, one.layer_start, one.head_start): 1 << number for number, one in enumerate(layouts)}
        self._whole = (1 << len(layouts)) - 1

    def _clear(self, tier: TierName) -> None:
        for block, (bits, _) in self._objects.pop(tier, {}).items():
            if bits == self._whole:
                self._note(tier, block, False)

    def _note(self, tier: TierName, block: bytes, is_there: bool) -> None:
        if self._enabled:
            self._changes.setdefault(tier, {})[block] = is_there
