"""From events to the index: one subscription per target, and what its events change.

Knows addresses and batches. Who is a target, and when it goes, its owner says.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import zmq

from kvstore.events.digest import Digest
from kvstore.events.foreign import ForeignChain
from kvstore.events.media import Tier, tier_of
from kvstore.events.messages import AllBlocksCleared, BlockHash, BlockStored, Event, EventBatch
from kvstore.events.subscriber import EventSubscriber, Socket
from kvstore.keys import KEY_BYTES
from router.index import PrefixIndex

log = logging.getLogger("headrace.feed")


class TargetView:
    """A target's part of the index, as the end of its event stream. `chain` translates a foreign engine's events."""

    def __init__(self, index: PrefixIndex, target_id: str, chain: ForeignChain | None = None) -> None:
        self._index, self._target_id, self._chain = index, target_id, chain

    def apply(self, events: Sequence[Event]) -> None:
        if self._chain is not None:
            events = self._chain.translate(events)
        for tier, changes in net_changes(events, lambda: self._index.clear(self._target_id)).items():
            stored = [key for key, is_stored in changes.items() if is_stored]
            removed = [key for key, is_stored in changes.items() if not is_stored]
            self._index.apply(self._target_id, stored=stored, removed=removed, tier=tier)

    def clear(self) -> None:
        if self._chain is not None:
            self._chain.clear()
        self._index.clear(self._target_id)

    def digest(self) -> Mapping[Tier, Digest]:
        return self._index.digest(self._target_id)


def net_changes(events: Sequence[Event], on_clear: Callable[[], None]) -> dict[Tier, dict[bytes, bool]]:
    """Return what is different after `events`, by tier: keys that are stored (True) or removed (False).

    A publisher never tells the same twice in a row, so a key whose first and last event differ is as it was.
    """
    changes: dict[Tier, dict[bytes, bool]] = {}
    firsts: dict[tuple[Tier, bytes], bool] = {}
    for event in events:
        if isinstance(event, AllBlocksCleared):
            changes.clear()
            firsts.clear()
            on_clear()
            continue
        tier = tier_of(event.medium)
        if tier is not None:
            is_stored = isinstance(event, BlockStored)
            of_tier = changes.setdefault(tier, {})
            for key in _own_keys(event.block_hashes):
                of_tier[key] = is_stored
                firsts.setdefault((tier, key), is_stored)
    for (tier, key), first in firsts.items():
        if changes[tier][key] is not first:
            del changes[tier][key]
    return changes


def _own_keys(hashes: Sequence[BlockHash]) -> list[bytes]:
    return [one for one in hashes if isinstance(one, bytes) and len(one) == KEY_BYTES]


class IndexFeed:
    """The subscriptions of one pool. `open_target` adds the target to the index, `close_target` drops it there.

    `secure(socket, public_key)` prepares a socket with the keys of both ends; `public_key` is the target's.
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        context: zmq.Context[Socket],
        secure: Callable[[Socket, str], None] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._index, self._context, self._secure, self._wall_clock = index, context, secure, wall_clock
        self._subscribers: dict[str, EventSubscriber] = {}
        self._lags_s: dict[str, float] = {}
        self._closed: Counter[str] = Counter()
        self._untold: Counter[tuple[str, str]] = Counter()
        self._told: dict[str, dict[str, int]] = {}

    @property
    def index(self) -> PrefixIndex:
        return self._index

    @property
    def lags_s(self) -> dict[str, float]:
        """By target, how old its last batch was when it was applied (between two hosts' clocks)."""
        return dict(self._lags_s)

    @property
    def counters(self) -> dict[str, int]:
        """Gaps, epochs, digest mismatches, replayed batches, dumps and malformed batches; over all targets, ever."""
        total = Counter(self._closed)
        for subscriber in self._subscribers.values():
            total.update(subscriber.counters)
        return dict(total)

    def take_counts(self) -> Counter[tuple[str, str]]:
        """Return what has been counted since the last call, by target and kind (as in `counters`)."""
        for target_id, subscriber in self._subscribers.items():
            self._gather(target_id, subscriber)
        counts, self._untold = self._untold, Counter()
        return counts

    def _gather(self, target_id: str, subscriber: EventSubscriber) -> None:
        told = self._told.get(target_id, {})
        self._told[target_id] = counted = subscriber.counters
        for kind, count in counted.items():
            if more := count - told.get(kind, 0):
                self._untold[target_id, kind] += more

    def open_target(
        self,
        target_id: str,
        events: str,
        events_replay: str | None,
        *,
        public_key: str | None = None,
        foreign: bool = False,
        topic: str = "",
    ) -> None:
        """Follow a target's events. `foreign` for publishers that are not ours: their hashes are not our keys."""
        self._index.add_target(target_id)
        secure, key = self._secure, public_key
        subscriber = EventSubscriber(
            events,
            events_replay,
            TargetView(self._index, target_id, ForeignChain() if foreign else None),
            context=self._context,
            topic=topic,
            dumps=not foreign,
            secure=None if secure is None or key is None else lambda socket: secure(socket, key),
            on_batch=lambda batch: self._note_lag(target_id, batch),
        )
        try:
            subscriber.open()
        except zmq.ZMQError as error:
            log.warning("the KV events at %s cannot be followed: %s", events, error)
            self._index.drop_target(target_id)
            return
        self._subscribers[target_id] = subscriber

    async def close_target(self, target_id: str) -> None:
        """Stop, and forget what the target has. Unknown ones are ignored."""
        subscriber = self._subscribers.pop(target_id, None)
        self._lags_s.pop(target_id, None)
        self._index.drop_target(target_id)
        if subscriber is not None:
            # Before anything is waited for: the target may be followed anew meanwhile.
            self._gather(target_id, subscriber)
            del self._told[target_id]
            await subscriber.close()
            self._closed.update(subscriber.counters)

    async def close(self) -> None:
        for target_id in list(self._subscribers):
            await self.close_target(target_id)

    def follows(self, target_id: str) -> bool:
        return target_id in self._subscribers

    def is_synced(self, target_id: str) -> bool:
        """Whether the index knows what the target has; False means that claims are missing."""
        subscriber = self._subscribers.get(target_id)
        return subscriber is not None and subscriber.synced

    def check_digest(self, target_id: str) -> None:
        """Compare the target's digest soon: its hits were not what was predicted."""
        if subscriber := self._subscribers.get(target_id):
            subscriber.check_digest()

    def _note_lag(self, target_id: str, batch: EventBatch) -> None:
        self._lags_s[target_id] = max(0.0, self._wall_clock() - batch.ts)
