"""This process's leases, as they are told to others: what is under way, and what has changed since it was last told.

Knows no sockets and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from router.dispatches import MAX_SHARED_KEYS, Dispatch
from router.sharing_messages import MAX_BATCH_KEYS, MAX_EVENTS, Dispatched, Event, FirstOutput, Released


class OwnLeases:
    """`on_change(is_full)` is called after every change; when `is_full`, the changes must be taken before the next.

    Memory is bounded by the leases that are under way, and by MAX_EVENTS changes.
    """

    def __init__(self, on_change: Callable[[bool], None]) -> None:
        self._on_change = on_change
        self._live: dict[tuple[str, int], Dispatch] = {}
        self._answered: set[tuple[str, int]] = set()
        self._changes: list[Event] = []
        self._keys = 0

    def __len__(self) -> int:
        return len(self._live)

    def observer(self, pool: str) -> PoolObserver:
        """Return the `DispatchObserver` of one pool. Peers know the pool by this name."""
        return PoolObserver(self, pool)

    def take_changes(self) -> list[Event]:
        changes, self._changes, self._keys = self._changes, [], 0
        return changes

    def snapshot(self) -> Iterator[list[Event]]:
        """Yield all that is under way, in parts of a message each. Keys are left out: they matter for seconds only."""
        part: list[Event] = []
        for (pool, lease_id), dispatch in self._live.items():
            part.append(Dispatched(pool, msgspec.structs.replace(dispatch, new_keys=())))
            if (pool, lease_id) in self._answered:
                part.append(FirstOutput(pool, lease_id))
            if len(part) >= MAX_EVENTS - 1:
                yield part
                part = []
        yield part

    def note_dispatched(self, pool: str, dispatch: Dispatch) -> None:
        if len(dispatch.new_keys) > MAX_SHARED_KEYS:
            dispatch = msgspec.structs.replace(dispatch, new_keys=dispatch.new_keys[:MAX_SHARED_KEYS])
        self._live[pool, dispatch.lease_id] = dispatch
        self._keys += len(dispatch.new_keys)
        self._note(Dispatched(pool, dispatch))

    def note_first_output(self, pool: str, lease_id: int) -> None:
        if (pool, lease_id) in self._live:
            self._answered.add((pool, lease_id))
            self._note(FirstOutput(pool, lease_id))

    def note_released(self, pool: str, lease_id: int) -> None:
        if self._live.pop((pool, lease_id), None) is not None:
            self._answered.discard((pool, lease_id))
            self._note(Released(pool, lease_id))

    def _note(self, event: Event) -> None:
        self._changes.append(event)
        self._on_change(len(self._changes) >= MAX_EVENTS or self._keys > MAX_BATCH_KEYS - MAX_SHARED_KEYS)


class PoolObserver:
    """The leases of one pool."""

    def __init__(self, leases: OwnLeases, pool: str) -> None:
        self._leases = leases
        self._pool = pool

    def dispatched(self, dispatch: Dispatch) -> None:
        self._leases.note_dispatched(self._pool, dispatch)

    def first_output(self, lease_id: int) -> None:
        self._leases.note_first_output(self._pool, lease_id)

    def released(self, lease_id: int) -> None:
        self._leases.note_released(self._pool, lease_id)
