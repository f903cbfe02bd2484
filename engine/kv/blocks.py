"""The blocks of one KV group: who uses each, which are free, and which hold a known prefix.

It knows ids, reference counts and keys. It does not know requests, tokens or memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec

from engine.plan import NULL_BLOCK


class BlockEvent(msgspec.Struct, frozen=True, array_like=True):
    """A key became available ("stored"), its block was reused ("removed"), or all keys went ("cleared", no key)."""

    kind: Literal["stored", "removed", "cleared"]
    key: bytes = b""


EventSink = Callable[[BlockEvent], None]


class BlockPool:
    """Blocks 1 .. num_blocks - 1; block 0 is the null block, which nobody owns and the free list uses as its head.

    A block with no users stays in the free list *with its key* until it is allocated again, so a prefix can still be
    hit. The list is ordered by reuse: the front goes first. Blocks without a key are put in front (nothing is lost),
    blocks with one at the back, so the prefix freed longest ago is reused first.
    """

    def __init__(self, num_blocks: int, on_event: EventSink | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, got num_blocks={num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self._on_event = on_event
        self._users = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._next = [(block + 1) % num_blocks for block in range(num_blocks)]
        self._prev = [(block - 1) % num_blocks for block in range(num_blocks)]

    @property
    def capacity(self) -> int:
        """Blocks that can be owned at all."""
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_free

    def users(self, block: int) -> int:
        return self._users[block]

    def key_of(self, block: int) -> bytes | None:
        """Return the key of a published block. Such a block is never written again while it keeps the key."""
        return self._keys[block]

    def find(self, key: bytes) -> int | None:
        return self._by_key.get(key)

    def allocate(self) -> int:
        """Take the free block that is least worth keeping. The caller has checked `num_free`."""
        block = self._next[NULL_BLOCK]
        assert block != NULL_BLOCK, "allocate() on an empty pool"
        self._unlink(block)
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            del self._by_key[key]
            self._emit("removed", key)
        self._users[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a user to a block that was found by its key."""
        if self._users[block] == 0:
            self._unlink(block)
        self._users[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one user of each block, null blocks aside. Pass a table's tail first: what is freed first is reused
        first, and a prefix without its tail is still a prefix."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            assert self._users[block] > 0, f"block {block} freed twice"
            self._users[block] -= 1
            if self._users[block] == 0:
                self._link(block, after=NULL_BLOCK if self._keys[block] is None else self._prev[NULL_BLOCK])

    def publish(self, block: int, key: bytes) -> bool:
        """Make a full block findable. Return False when the key has a block already: the first one keeps it."""
        assert self._users[block] > 0, f"block {block} published without a user"
        if key in self._by_key:
            return False
        assert self._keys[block] is None, f"block {block} published under two keys"
        self._keys[block] = key
        self._by_key[key] = block
        self._emit("stored", key)
        return True

    def clear(self) -> None:
        """Forget every key. Users keep their blocks."""
        for block in self._by_key.values():
            self._keys[block] = None
        self._by_key.clear()
        if self._on_event is not None:
            self._on_event(BlockEvent("cleared"))

    def check_integrity(self, users: Mapping[int, int]) -> None:
        """Raise AssertionError unless `users` (block -> how many tables name it) and the pool's books agree."""
        free = []
        block, previous = self._next[NULL_BLOCK], NULL_BLOCK
        while block != NULL_BLOCK:
            assert self._prev[block] == previous, f"block {block}: broken free list"
            free.append(block)
            assert len(free) <= self.capacity, "the free list has a cycle"
            block, previous = self._next[block], block
        assert self._prev[NULL_BLOCK] == previous, "broken free list at its end"
        assert len(free) == len(set(free)) == self.num_free, "num_free differs from the free list"
        assert all(self._users[block] == 0 for block in free), "a used block is in the free list"
        assert self._users[NULL_BLOCK] == 0, "the null block is owned"
        assert self._keys[NULL_BLOCK] is None, "the null block is published"
        used = {block: count for block, count in enumerate(self._users) if count}
        assert used == dict(users), "reference counts differ from the tables"
        assert len(used) + self.num_free == self.capacity, "free + used differs from the total"
        keyed = {key: block for block, key in enumerate(self._keys) if key is not None}
        assert keyed == self._by_key, "keys and blocks differ"

    def _emit(self, kind: Literal["stored", "removed"], key: bytes) -> None:
        if self._on_event is not None:
            self._on_event(BlockEvent(kind, key))

    def _link(self, block: int, after: int) -> None:
        follower = self._next[after]
        self._next[after] = block
        self._prev[block] = after
        self._next[block] = follower
        self._prev[follower] = block
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1
