"""Which of a tier's objects goes next. Knows an order of keys, not sizes, tiers or why room is needed.

Which policy is better depends on the tier: S3-FIFO where it is much smaller than what is used again, LRU where it holds
most of that. `Adaptive` finds out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)
Permit = Callable[[K], bool]
"""Whether a key may go now: it is not read, pinned or otherwise kept."""


class Eviction(Protocol[K]):
    """An order of the keys that were added and not removed."""

    def __len__(self) -> int: ...

    def add(self, key: K, *, oldest: bool = False) -> None:
        """Put in a key that is not there, as one that is new or as the one that has been there for longest."""
        ...

    def use(self, key: K) -> None: ...

    def candidate(self, may: Permit[K]) -> K | None:
        """Return the key that should go next of those that may, None when none may. It stays until it is removed.

        Keys that should go and may not count as used, so that they are not asked about every time.
        """
        ...

    def remove(self, key: K, *, evicted: bool) -> None:
        """Take out a key; `evicted` says that it is for want of room, and not because it is wrong or unwanted."""
        ...


class LRU(Generic[K]):
    """The key that was not used for longest goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, key: K, *, oldest: bool = False) -> None:
        self._order[key] = None
        if oldest:
            self._order.move_to_end(key, last=False)

    def use(self, key: K) -> None:
        self._order.move_to_end(key)

    def candidate(self, may: Permit[K]) -> K | None:
        for _ in range(len(self._order)):
            key = next(iter(self._order))
            if may(key):
                return key
            self._order.move_to_end(key)
        return None

    def remove(self, key: K, *, evicted: bool) -> None:
        del self._order[key]


SMALL_SHARE = 0.1
MAX_USES = 3


class S3Fifo(Generic[K]):
    """Three queues (Yang et al., SOSP 2023): new keys go through a small one, and only what is used there more than
    once, or comes back soon after it went, gets into the main one.

    Counted in keys instead of bytes: a tier's objects are of about one size.
    """

    def __init__(self) -> None:
        self._small: OrderedDict[K, int] = OrderedDict()
        self._main: OrderedDict[K, int] = OrderedDict()
        self._ghosts: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def add(self, key: K, *, oldest: bool = False) -> None:
        queue = self._small
        if key in self._ghosts:
            del self._ghosts[key]
            queue = self._main
        queue[key] = 0
        if oldest:
            queue.move_to_end(key, last=False)

    def use(self, key: K) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, MAX_USES)

    def candidate(self, may: Permit[K]) -> K | None:
        small_first = len(self._small) > SMALL_SHARE * len(self) or not self._main
        first, second = (self._of_small, self._of_main) if small_first else (self._of_main, self._of_small)
        found = first(may)
        return second(may) if found is None else found

    def remove(self, key: K, *, evicted: bool) -> None:
        if self._main.pop(key, None) is not None:
            return
        del self._small[key]
        if evicted:
            self._ghosts[key] = None
            while len(self._ghosts) > max(1, len(self)):
                self._ghosts.popitem(last=False)

    def _of_small(self, may: Permit[K]) -> K | None:
        refused = 0
        while refused < len(self._small):
            key, uses = next(iter(self._small.items()))
            if uses > 1:
                del self._small[key]
                self._main[key] = 0
            elif may(key):
                return key
            else:
                self._small.move_to_end(key)
                refused += 1
        return None

    def _of_main(self, may: Permit[K]) -> K | None:
        # Ends: every round takes a use from a key, of which there are at most 3 each, or counts one more refusal.
        refused = 0
        while refused < len(self._main):
            key, uses = next(iter(self._main.items()))
            if not uses and may(key):
                return key
            self._main.move_to_end(key)
            self._main[key] = max(0, uses - 1)
            refused = 0 if uses else refused + 1
        return None


SAMPLED = 8
"""One key of so many is in the trials by which the better policy is found."""

REMEMBERED_HITS = 512
"""Hits of both trials after which all count half: loads change."""


class _Trial(Generic[K]):
    """A small tier of sampled keys that is told what a large one is told, and evicts by one policy alone."""

    def __init__(self, order: Eviction[K]) -> None:
        self._order = order
        self._held: set[K] = set()
        self.hits = 0

    def see(self, key: K, capacity: int) -> None:
        if key in self._held:
            self.hits += 1
            self._order.use(key)
            return
        while len(self._held) >= capacity and (victim := self._order.candidate(lambda _: True)) is not None:
            self._order.remove(victim, evicted=True)
            self._held.remove(victim)
        self._order.add(key)
        self._held.add(key)


class Adaptive(Generic[K]):
    """LRU or S3-FIFO, whichever has more hits in a trial beside it: a sample of the keys in an eighth of the room, as
    miniature simulations are made (Waldspurger et al., ATC 2017). Both orders are kept, so that a change costs nothing.
    """

    def __init__(self) -> None:
        self._lru, self._s3fifo = LRU[K](), S3Fifo[K]()
        self._lru_trial, self._s3fifo_trial = _Trial(LRU[K]()), _Trial(S3Fifo[K]())
        self._full = False

    def __len__(self) -> int:
        return len(self._lru)

    @property
    def better(self) -> Eviction[K]:
        return self._s3fifo if self._s3fifo_trial.hits > self._lru_trial.hits else self._lru

    def add(self, key: K, *, oldest: bool = False) -> None:
        self._lru.add(key, oldest=oldest)
        self._s3fifo.add(key, oldest=oldest)
        if not oldest:
            self._try(key)

    def use(self, key: K) -> None:
        self._lru.use(key)
        self._s3fifo.use(key)
        self._try(key)

    def candidate(self, may: Permit[K]) -> K | None:
        self._full = True
        return self.better.candidate(may)

    def remove(self, key: K, *, evicted: bool) -> None:
        self._lru.remove(key, evicted=evicted)
        self._s3fifo.remove(key, evicted=evicted)

    def _try(self, key: K) -> None:
        # Before anything had to go, the size of the tier is not known, and both policies would do.
        if not self._full or hash((key, SAMPLED)) % SAMPLED:
            return
        for trial in (self._lru_trial, self._s3fifo_trial):
            trial.see(key, max(1, len(self) // SAMPLED))
        if self._lru_trial.hits + self._s3fifo_trial.hits > REMEMBERED_HITS:
            self._lru_trial.hits //= 2
            self._s3fifo_trial.hits //= 2


POLICIES: dict[str, type[LRU[Hashable]] | type[S3Fifo[Hashable]] | type[Adaptive[Hashable]]] = {
    "lru": LRU,
    "s3fifo": S3Fifo,
    "adaptive": Adaptive,
}
