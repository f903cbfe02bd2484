"""An engine with nothing but a store: it computes prompts block by block, saves, looks up and loads them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.keys import PUBLIC_SCOPE, KeyChain
from kvstore.manager.contract import Loaded, Released, StoredBlock
from kvstore.manager.store import KVStore
from kvstore.namespace import Namespace
from tests.support.numpy_memory import NumpyMemory

T = TypeVar("T")


class StoreEngine:
    """`blocks` of memory in each group. Everything waits until the store has answered."""

    def __init__(self, store: KVStore, namespace: Namespace, blocks: int = 64) -> None:
        self.memory = NumpyMemory(namespace, blocks)
        self.groups = len(namespace.groups)
        self.block_size = namespace.block_size
        self._woken = threading.Event()
        self.client = store.attach(namespace, self.memory, self._woken.set)
        self.free = list(range(1, blocks))
        self.ended: dict[str, list[Loaded | Released]] = {}
        self._requests = 0

    def close(self) -> None:
        self.client.close()

    def keys_of(self, tokens: Sequence[int], scope: bytes = PUBLIC_SCOPE) -> list[bytes]:
        return KeyChain(scope, self.block_size).extend(tokens)

    def compute(self, tokens: Sequence[int], scope: bytes = PUBLIC_SCOPE, *, save: bool = True) -> None:
        """Run a prompt to its end without loading anything."""
        request_id, keys = self.new_id(), self.keys_of(tokens, scope)
        self.client.look_up(request_id, scope, keys, len(keys), save=save)
        ids = self.take(len(keys))
        for block, key in zip(ids, keys, strict=True):
            self.memory.fill(block, key)
        self.client.save(self.stored(request_id, tokens, keys, ids, scope))
        self.leave(request_id, ids, len(keys))

    def load(self, tokens: Sequence[int], scope: bytes = PUBLIC_SCOPE, start: int = 0) -> tuple[list[str], int]:
        """Ask for a prompt; return the tiers that were promised and how many blocks came, each the right one."""
        request_id, keys = self.new_id(), self.keys_of(tokens, scope)
        self.client.look_up(request_id, scope, keys, start)
        found = self.until(lambda: self.client.found(request_id, start, len(keys)))
        if not found.tiers:
            self.client.finish(request_id, 0)
            return [], 0
        ids = self.take(len(found.tiers))
        self.client.load(request_id, start, [[block[group] for block in ids] for group in range(self.groups)])
        loaded = self.until(lambda: self.next_of(request_id))
        assert isinstance(loaded, Loaded)
        for block, key in zip(ids[: loaded.blocks], keys[start:], strict=False):
            assert self.memory.holds(block, key), "a wrong block was loaded"
        self.leave(request_id, ids, 0)
        return list(found.tiers), loaded.blocks

    def load_patiently(self, tokens: Sequence[int]) -> tuple[list[str], int]:
        """Ask until something is found: a server may miss the deadline of a look-up on a busy machine."""
        while True:
            tiers, blocks = self.load(tokens)
            if tiers:
                return tiers, blocks

    def stored(
        self,
        request_id: str,
        tokens: Sequence[int],
        keys: Sequence[bytes],
        ids: Sequence[tuple[int, ...]],
        scope: bytes,
    ) -> list[StoredBlock]:
        size = self.block_size
        return [
            StoredBlock(
                request_id,
                scope,
                index,
                key,
                keys[index - 1] if index else scope,
                tuple(tokens[index * size : (index + 1) * size]),
                ids[index],
            )
            for index, key in enumerate(keys)
        ]

    def take(self, count: int) -> list[tuple[int, ...]]:
        return [(block,) * self.groups for block in (self.free.pop() for _ in range(count))]

    def leave(self, request_id: str, ids: Sequence[tuple[int, ...]], keep_blocks: int) -> None:
        """End the request and use its blocks for something else, as soon as that is allowed."""
        if self.client.finish(request_id, keep_blocks):
            released = self.until(lambda: self.next_of(request_id))
            assert isinstance(released, Released)
        for block in ids:
            self.memory.scribble(block)
            self.free.append(block[0])

    def new_id(self) -> str:
        self._requests += 1
        return f"r{self._requests}"

    def next_of(self, request_id: str) -> Loaded | Released | None:
        self.poll()
        ended = self.ended.get(request_id)
        return ended.pop(0) if ended else None

    def poll(self) -> None:
        for one in self.client.poll():
            self.ended.setdefault(one.request_id, []).append(one)

    def until(self, ask: Callable[[], T | None]) -> T:
        """Ask until there is an answer, and again whenever the store has something to tell."""
        while True:
            self._woken.clear()
            answer = ask()
            if answer is not None:
                return answer
            self._woken.wait(0.01)
