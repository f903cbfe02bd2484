"""What the prefix cache tells the outside: which prefixes can be served from now on, and which no more.

A hit needs all KV groups. A block is therefore told as stored when the last group has it and as removed when the first
one has lost it: who claims a prefix only when all of its blocks are stored never claims what a group cannot serve. The
engine itself may serve more, since a sliding window needs only its last blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv.blocks import BlockEvent
from kvstore.events.media import MEDIUM_OF
from kvstore.events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event

DEVICE = MEDIUM_OF["device"]


class KVEventLog:
    """Collects between two calls of `take`, once it is `enabled`: before anything is cached. `on_block` hears the
    pools, `stored` the scheduler, which knows what is in a block.
    """

    def __init__(self, num_groups: int, block_size: int) -> None:
        self.enabled = False
        self._num_groups, self._block_size = num_groups, block_size
        self._groups: dict[bytes, int] = {}
        self._told: set[bytes] = set()
        self._events: list[Event] = []

    def on_block(self, _group: int, event: BlockEvent) -> None:
        """A `GroupEventSink`."""
        if not self.enabled:
            return
        if event.kind == "stored":
            self._groups[event.key] = self._groups.get(event.key, 0) + 1
        elif event.kind == "removed":
            self._remove(event.key)
        else:
            self._clear()

    def stored(self, scope: bytes, parent: bytes | None, key: bytes, token_ids: Sequence[int]) -> None:
        """The pools have published the block of `token_ids`, which follows on `parent`: None at the sequence's start.

        What they do not have in all groups is not told.
        """
        if not self.enabled or self._groups.get(key) != self._num_groups or key in self._told:
            return
        self._told.add(key)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
            last.block_hashes.append(key)
            last.token_ids.extend(token_ids)
            return
        event = BlockStored(
            block_hashes=[key],
            parent_block_hash=parent,
            token_ids=list(token_ids),
            block_size=self._block_size,
            medium=DEVICE,
            scope=scope,
        )
        self._events.append(event)

    def take(self) -> list[Event]:
        """Return what has happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def content(self) -> list[bytes]:
        """Return all keys that are stored now; what was not taken yet is in it."""
        self._events = []
        return list(self._told)

    def _remove(self, key: bytes) -> None:
        left = self._groups.pop(key, 0) - 1
        if left > 0:
            self._groups[key] = left
        if key not in self._told:
            return
        self._told.remove(key)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(key)
        else:
            self._events.append(BlockRemoved(block_hashes=[key], medium=DEVICE))

    def _clear(self) -> None:
        # Every group's pool says so; what is told is told once.
        if self._groups:
            self._groups.clear()
            self._told.clear()
            self._events.append(AllBlocksCleared())
