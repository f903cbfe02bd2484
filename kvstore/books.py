"""The books of a tier that evicts by itself: what it holds, whose that is, what is pinned, and what goes next.

Owners with a quota have an order of their own, so that none of them can push out another's objects beyond its share.
Knows no bytes and takes no locks: a tier calls it under its own.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from kvstore.eviction import LRU, Eviction
from kvstore.object_key import ObjectKey

PIN_SHARE = 0.3
"""Share of a tier's capacity that can be pinned: the rest has to follow the load."""

COMPARED_ORDERS = 16
"""Of so many owners' orders the oldest candidate goes. With more owners they take turns."""

_EVERYBODY = b""


class Entry(msgspec.Struct, gc=False):
    """One object. `users` keep it from eviction: readers of its memory, or a file that cannot be deleted.

    `size_bytes` is what it takes physically, `length` the bytes of the object itself. `last_use` counts uses of the
    tier, from 0 down for what was there before it was opened. `place` is the tier's own.
    """

    key: ObjectKey
    size_bytes: int
    length: int
    last_use: int
    place: int = 0
    users: int = 0


class Quotas:
    """Bytes by owner. An owner without an entry has `default`, and None is no limit: quotas that are not known yet
    must not cost a tenant what it has stored."""

    def __init__(self, limits: Mapping[bytes, int] | None = None, default: int | None = None) -> None:
        self.limits = dict(limits or {})
        self.default = default

    def of(self, owner: bytes) -> int | None:
        return self.limits.get(owner, self.default)


class Books:
    """`capacity_bytes` bounds pins only: how much fits is the tier's to know."""

    def __init__(
        self,
        capacity_bytes: int,
        quotas: Quotas | None = None,
        policy: Callable[[], Eviction[ObjectKey]] = LRU,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.used_bytes = 0
        self.quotas = quotas or Quotas()
        self._capacity_bytes, self._policy, self._clock = capacity_bytes, policy, clock
        self._entries: dict[ObjectKey, Entry] = {}
        self._of_owner: Counter[bytes] = Counter()
        self._orders: dict[bytes, Eviction[ObjectKey]] = {}
        self._turns: deque[bytes] = deque()
        self._pins: dict[ObjectKey, float] = {}
        self._uses = self._before = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: ObjectKey) -> Entry | None:
        return self._entries.get(key)

    @property
    def pinned_bytes(self) -> int:
        now = self._clock()
        for key in [key for key, until in self._pins.items() if until <= now]:
            del self._pins[key]
        return sum(self._entries[key].size_bytes for key in self._pins)

    def owner_bytes(self, owner: bytes) -> int:
        """Return what an owner's objects take, with what is set aside for more."""
        return self._of_owner[owner]

    def owners(self) -> list[tuple[bytes, int, int | None]]:
        """Return each owner that has something, or a quota of its own, with its bytes and its quota."""
        known = self._of_owner.keys() | self.quotas.limits.keys()
        return [(owner, self._of_owner[owner], self.quotas.of(owner)) for owner in known]

    def over_quota(self, owner: bytes, more_bytes: int) -> bool:
        limit = self.quotas.of(owner)
        return limit is not None and self._of_owner[owner] + more_bytes > limit

    def set_aside(self, owner: bytes, size_bytes: int) -> None:
        """Count bytes of an object that is still being written; negative when it is written or given up."""
        self.used_bytes += size_bytes
        self._of_owner[owner] += size_bytes
        if not self._of_owner[owner]:
            del self._of_owner[owner]

    def add(self, key: ObjectKey, size_bytes: int, length: int, place: int = 0, *, oldest: bool = False) -> Entry:
        """Enter an object that is not there, as new or as the oldest of all."""
        assert key not in self._entries, "an object was entered twice"
        if oldest:
            self._before -= 1
        else:
            self._uses += 1
        entry = Entry(key, size_bytes, length, self._before if oldest else self._uses, place)
        self._entries[key] = entry
        self.set_aside(key.owner, size_bytes)
        self._order_of(key.owner).add(key, oldest=oldest)
        return entry

    def remove(self, key: ObjectKey, *, evicted: bool = False) -> Entry:
        entry = self._entries.pop(key)
        self.set_aside(key.owner, -entry.size_bytes)
        self._pins.pop(key, None)
        self._leave_order(key, evicted=evicted)
        return entry

    def use(self, entry: Entry) -> None:
        self._uses += 1
        entry.last_use = self._uses
        self._order_of(entry.key.owner).use(entry.key)

    def touch(self, keys: Iterable[ObjectKey]) -> None:
        """Use the entries that are there, the last key first: prefixes are needed for longer than their tails."""
        for key in reversed(list(keys)):
            entry = self._entries.get(key)
            if entry is not None:
                self.use(entry)

    def pin(self, keys: Iterable[ObjectKey], seconds: float) -> int:
        """Pin what is there and fits into the share for pins; return how many. 0 seconds unpin."""
        pinned, until, count = self.pinned_bytes, self._clock() + seconds, 0
        for key in keys:
            entry = self._entries.get(key)
            if seconds <= 0 or entry is None:
                self._pins.pop(key, None)
                continue
            more = 0 if key in self._pins else entry.size_bytes
            if pinned + more <= PIN_SHARE * self._capacity_bytes:
                pinned += more
                self._pins[key] = until
                count += 1
        return count

    def may_go(self, entry: Entry) -> bool:
        """Whether an entry is neither used nor pinned."""
        return not entry.users and self._pins.get(entry.key, 0.0) <= self._clock()

    def candidate(self, owner: bytes | None = None, may: Callable[[Entry], bool] = lambda entry: True) -> Entry | None:
        """Return what should go next of an owner's objects, or of all: the one that was not used for longest of those
        that their orders name. None when nothing may go."""

        def permit(key: ObjectKey) -> bool:
            entry = self._entries[key]
            return (owner is None or key.owner == owner) and self.may_go(entry) and may(entry)

        if owner is not None:
            found = [self._order_of(owner).candidate(permit)]
        else:
            found = [order.candidate(permit) for order in self._next_orders()]
            if len(self._turns) > COMPARED_ORDERS and all(key is None for key in found):
                found = [order.candidate(permit) for order in self._orders.values()]
        entries = [self._entries[key] for key in found if key is not None]
        return min(entries, key=lambda entry: entry.last_use, default=None)

    def select(self, namespace: bytes | None, owner: bytes | None) -> list[ObjectKey]:
        """Return the keys of a namespace, an owner, both together or (neither) all."""
        return [
            key
            for key in self._entries
            if (namespace is None or key.namespace == namespace) and (owner is None or key.owner == owner)
        ]

    def set_quota(self, owner: bytes, limit_bytes: int | None) -> None:
        """Set an owner's quota; None takes it away. What is over it goes when the owner stores more."""
        keys = sorted(self.select(None, owner), key=lambda key: self._entries[key].last_use)
        for key in keys:
            self._leave_order(key, evicted=False)
        if limit_bytes is None:
            self.quotas.limits.pop(owner, None)
        else:
            self.quotas.limits[owner] = limit_bytes
        for key in keys:
            self._order_of(owner).add(key)

    def _whose(self, owner: bytes) -> bytes:
        return _EVERYBODY if self.quotas.of(owner) is None else owner

    def _order_of(self, owner: bytes) -> Eviction[ObjectKey]:
        whose = self._whose(owner)
        order = self._orders.get(whose)
        if order is None:
            order = self._orders[whose] = self._policy()
            self._turns.append(whose)
        return order

    def _leave_order(self, key: ObjectKey, *, evicted: bool) -> None:
        whose = self._whose(key.owner)
        order = self._orders[whose]
        order.remove(key, evicted=evicted)
        if not len(order) and whose != _EVERYBODY:
            del self._orders[whose]
            self._turns.remove(whose)

    def _next_orders(self) -> list[Eviction[ObjectKey]]:
        turn = min(COMPARED_ORDERS, len(self._turns))
        names = [self._turns[index] for index in range(turn)]
        self._turns.rotate(-turn)
        return [self._orders[name] for name in names]

    def check_integrity(self) -> None:
        """Raise AssertionError unless entries, sums, orders and pins agree. Nothing may be set aside."""
        assert self.used_bytes == sum(entry.size_bytes for entry in self), "the sum of bytes is wrong"
        by_owner: Counter[bytes] = Counter()
        for entry in self:
            by_owner[entry.key.owner] += entry.size_bytes
        assert by_owner == self._of_owner, "the sums of the owners are wrong"
        assert sum(len(order) for order in self._orders.values()) == len(self), "orders and entries differ"
        assert set(self._pins) <= set(self._entries), "something is pinned that is gone"
        assert set(self._turns) == set(self._orders), "an order has no turn"
