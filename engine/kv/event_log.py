"""What the prefix cache tells the outside: which prefixes can be served from now on, and which no more.

A hit needs all KV groups. Groups with full attention need every block of the prefix, so a block is told when all of
them have it. Sliding windows need only the last blocks. With both kinds, blocks of the full groups are told as parts of
a run ("device_run"), and those behind which all windows can go on as ends ("device_end"): a hit is a run from the start
to an end. Without full groups every block has to be in every window: less than the engine can serve, but never more.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv.blocks import BlockEvent
from engine.kv.tier_blocks import Changes, TierBlocks
from engine.kv.window_ends import WindowEnds
from kvstore.events.media import MEDIUM_OF, Tier
from kvstore.events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event

DEVICE_TIERS: frozenset[Tier] = frozenset({"device", "device_run", "device_end"})

MAX_KEYS = 16_384
"""Of a tier in one event."""


class KVEventLog:
    """Collects between two calls of `take`, once it is `enabled`: before anything is cached.

    `windows` has the tokens that each KV group sees, None for all. `on_block` hears the pools, `stored` the scheduler,
    which knows what is in a block.
    """

    def __init__(self, windows: Sequence[int | None], block_size: int) -> None:
        self._enabled = False
        self._tiers: TierBlocks | None = None
        self._block_size = block_size
        self._ends: WindowEnds | None = None
        self._needed = frozenset(range(len(windows)))
        if None in windows and any(windows):
            self._needed = frozenset(group for group, window in enumerate(windows) if window is None)
            self._ends = WindowEnds(windows, block_size, self._end_changed)
        self._tier: Tier = "device" if self._ends is None else "device_run"
        self._groups: dict[bytes, int] = {}
        self._told: dict[Tier, set[bytes]] = {self._tier: set()}
        self._events: list[Event] = []
        # By tier, what the next change of the same kind is added to. Tiers are independent of each other.
        self._last: dict[Tier, BlockStored | BlockRemoved] = {}

    @property
    def enabled(self) -> bool:
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._enabled = value
        if value and self._tiers is not None:
            self._tiers.enable()

    def follow(self, tiers: TierBlocks) -> None:
        """Tell also what the store's tiers hold. Before it is enabled."""
        self._tiers = tiers

    def on_block(self, group: int, event: BlockEvent) -> None:
        """A `GroupEventSink`."""
        if not self.enabled:
            return
        if event.kind == "cleared":
            self._clear()
        elif group in self._needed:
            if event.kind == "stored":
                self._groups[event.key] = self._groups.get(event.key, 0) + 1
            else:
                self._remove(event.key)
        elif self._ends is not None:
            self._ends.on_block(group, event)

    def stored(self, scope: bytes, keys: Sequence[bytes], index: int, token_ids: Sequence[int]) -> None:
        """The pools have published block `index` of a sequence, in which `token_ids` are. `keys` are the sequence's
        from its start. What the groups do not have is not told.
        """
        key, told = keys[index], self._told[self._tier]
        if not self.enabled or self._groups.get(key) != len(self._needed) or key in told:
            return
        told.add(key)
        parent = keys[index - 1] if index else None
        last = self._last.get(self._tier)
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
            last.block_hashes.append(key)
            last.token_ids.extend(token_ids)
        else:
            self._tell_stored(self._tier, key, parent, scope, token_ids)
        if self._ends is not None:
            self._ends.add(keys, index)

    def take(self) -> list[Event]:
        """Return what has happened since the last call, in order."""
        if self._tiers is not None:
            self._take_tiers(self._tiers.take())
        events, self._events = self._events, []
        self._last.clear()
        return events

    def content(self) -> dict[Tier, list[bytes]]:
        """Return all keys that are told now; what was not taken yet is in it."""
        self.take()
        return {tier: list(keys) for tier, keys in self._told.items()}

    def _tell_stored(
        self, tier: Tier, key: bytes, parent: bytes | None, scope: bytes | None, token_ids: Sequence[int]
    ) -> None:
        event = self._last[tier] = BlockStored(
            block_hashes=[key],
            parent_block_hash=parent,
            token_ids=list(token_ids),
            block_size=self._block_size,
            medium=MEDIUM_OF[tier],
            scope=scope,
        )
        self._events.append(event)

    def _take_tiers(self, changes: Changes) -> None:
        for tier, blocks in changes.items():
            told = self._told.setdefault(tier, set())
            stored = [key for key, is_there in blocks.items() if is_there and key not in told]
            removed = [key for key, is_there in blocks.items() if not is_there and key in told]
            told.difference_update(removed)
            told.update(stored)
            if removed:
                self._events.append(BlockRemoved(block_hashes=list(removed), medium=MEDIUM_OF[tier]))
            self._tell_tier(tier, stored)

    def _tell_tier(self, tier: Tier, keys: Sequence[bytes]) -> None:
        """The store knows no token ids: they were told when the device had the block."""
        for start in range(0, len(keys), MAX_KEYS):
            self._events.append(
                BlockStored(
                    block_hashes=list(keys[start : start + MAX_KEYS]),
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=self._block_size,
                    medium=MEDIUM_OF[tier],
                )
            )

    def _end_changed(self, key: bytes, is_end: bool) -> None:
        ends = self._told.setdefault("device_end", set())
        if is_end:
            ends.add(key)
            last = self._last.get("device_end")
            if isinstance(last, BlockStored):
                last.block_hashes.append(key)
            else:
                self._tell_stored("device_end", key, None, None, ())
        else:
            ends.remove(key)
            self._tell_removed("device_end", key)

    def _remove(self, key: bytes) -> None:
        left = self._groups.pop(key, 0) - 1
        if left > 0:
            self._groups[key] = left
        told = self._told[self._tier]
        if key not in told:
            return
        told.remove(key)
        self._tell_removed(self._tier, key)
        if self._ends is not None:
            self._ends.remove(key)

    def _tell_removed(self, tier: Tier, key: bytes) -> None:
        last = self._last.get(tier)
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(key)
        else:
            event = self._last[tier] = BlockRemoved(block_hashes=[key], medium=MEDIUM_OF[tier])
            self._events.append(event)

    def _clear(self) -> None:
        # Every group's pool says so, one after the other; what is told is told once.
        if self._ends is not None:
            self._ends.clear()
        if self._groups:
            self._groups.clear()
            for tier in DEVICE_TIERS:
                if tier in self._told:
                    self._told[tier].clear()
            self._last.clear()
            # That is of all tiers to its readers; the store's have kept theirs.
            self._events.append(AllBlocksCleared())
            for tier in self._told.keys() - DEVICE_TIERS:
                self._tell_tier(tier, list(self._told[tier]))
