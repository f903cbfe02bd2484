"""The KV blocks of one simulated worker: some hold what runs, the rest what ran, the least recently used to go first.

An exact LRU over block keys. A running request holds the cached blocks that it began with and room for all that it will
have; a block becomes shared when it has been computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockCache:
    """`stored` and `removed` collect the keys that came and went; the owner takes them as KV events."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.stored: list[bytes] = []
        self.removed: list[bytes] = []
        self._holders: dict[bytes, int] = {}  # shared blocks of running requests, by how many hold them
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # shared blocks that nobody holds, oldest first
        self._private = 0

    @property
    def used(self) -> int:
        """Blocks that running requests hold: the others can be had at any time."""
        return self._private + len(self._holders)

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks are there."""
        for count, key in enumerate(keys):
            if key not in self._holders and key not in self._idle:
                return count
        return len(keys)

    def reserve(self, keys: Sequence[bytes], total_blocks: int) -> bool:
        """Hold the blocks of `keys`, which are there, and room for the rest of `total_blocks`; False if that is too
        much beside what is held already."""
        fresh = [key for key in keys if key not in self._holders]
        private = total_blocks - len(keys)
        if self.used + len(fresh) + private > self.capacity:
            return False
        for key in keys:
            self._holders[key] = self._holders.get(key, 0) + 1
        for key in fresh:
            del self._idle[key]
        self._private += private
        while self.used + len(self._idle) > self.capacity:
            oldest, _ = self._idle.popitem(last=False)
            self.removed.append(oldest)
        return True

    def publish(self, key: bytes) -> bool:
        """Share a block that was computed. False when another request did so first: this one stays private."""
        if key in self._holders or key in self._idle:
            return False
        self._private -= 1
        self._holders[key] = 1
        self.stored.append(key)
        return True

    def release(self, keys: Sequence[bytes], private_blocks: int) -> None:
        """Give up shared blocks, which stay until their place is needed, and private ones."""
        self._private -= private_blocks
        # The ends of prompts go first: without its beginning a block is of no use.
        for key in reversed(keys):
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._idle[key] = None

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return what was stored and removed since the last call."""
        events = self.stored, self.removed
        self.stored, self.removed = [], []
        return events
