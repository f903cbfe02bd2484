"""Objects on their way from a slower tier into memory: each is fetched once, however many wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.object_key import ObjectKey
from kvstore.ram.leases import Slot
from kvstore.ram.tier import RamTier
from kvstore.tier import Deadline, Outcome, Tier, Want

OnFetched = Callable[[ObjectKey, bool], None]
"""Hears of a key, once, whether it is in memory now. Called from any thread, under no lock of the fetches."""


@dataclass(slots=True, eq=False)
class _Fetch:
    slot: Slot
    tiers: list[Tier]
    """Those to ask, this one's first."""
    waiters: list[OnFetched] = field(default_factory=list)


class Fetches:
    """Fetched objects stay in memory under their keys. A fetch goes on when nobody waits for it any more."""

    def __init__(self, ram: RamTier) -> None:
        self._ram = ram
        self._lock = threading.Lock()
        self._running: dict[ObjectKey, _Fetch] = {}

    def __len__(self) -> int:
        return len(self._running)

    def fetch(
        self, keys: Sequence[tuple[ObjectKey, int]], tiers: Sequence[Tier], deadline: Deadline, on_fetched: OnFetched
    ) -> None:
        """Fetch objects of known sizes from the first of `tiers` that has them."""
        begun: list[tuple[ObjectKey, _Fetch]] = []
        refused: list[ObjectKey] = []
        for key, size_bytes in keys:
            with self._lock:
                running = self._running.get(key)
                if running is not None:
                    running.waiters.append(on_fetched)
                    continue
            slot = self._ram.reserve(key, size_bytes) if tiers else None
            if slot is None:
                refused.append(key)
                continue
            fetch = _Fetch(slot, list(tiers), [on_fetched])
            with self._lock:
                other = self._running.setdefault(key, fetch)
                if other is not fetch:
                    other.waiters.append(on_fetched)
            if other is fetch:
                begun.append((key, fetch))
            else:
                slot.abandon()
        for key in refused:
            on_fetched(key, False)
        self._ask(begun, deadline)

    def _ask(self, fetches: Sequence[tuple[ObjectKey, _Fetch]], deadline: Deadline) -> None:
        if not fetches:
            return

        def report(index: int, outcome: Outcome) -> None:
            key, fetch = fetches[index]
            if outcome.status != "ok" and len(fetch.tiers) > 1:
                del fetch.tiers[0]
                self._ask([(key, fetch)], deadline)
            else:
                self._end(key, fetch, found=outcome.status == "ok")

        wants = [Want(key, fetch.slot.view) for key, fetch in fetches]
        fetches[0][1].tiers[0].load(wants, deadline, report)

    def _end(self, key: ObjectKey, fetch: _Fetch, *, found: bool) -> None:
        # In memory before it is no longer being fetched: nobody in between finds neither.
        if found:
            fetch.slot.publish()
        else:
            fetch.slot.abandon()
        with self._lock:
            del self._running[key]
            waiters = fetch.waiters
        for waiter in waiters:
            waiter(key, found)
