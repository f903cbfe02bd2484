"""The contract of a tier: a place that keeps objects by key. What every tier does, and who owns which bytes when.

Nothing here waits, raises or decides for the caller: work is handed over with a deadline and each piece of it is
reported exactly once, from whatever thread. Until a piece is reported its memory belongs to the tier, also past the
deadline: a target may still be written to, a source still be read. A tier that is slow, full, broken or lying reports
what keeps a request going without it, and never an object that is not whole and the one that was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from kvstore.object_key import ObjectKey

TierName = Literal["ram", "disk", "remote"]

Status = Literal["ok", "miss", "corrupt", "refused", "late", "failed", "cancelled"]
"""How a piece of work ended.

ok: it is done. miss: the tier has no such object. corrupt: it had one that was not what it should be, which is gone
now. refused: it did not try, for want of room or because its breaker is open. late: the deadline came first. failed:
it tried and could not. cancelled: the tier was closed first.
"""

BreakerState = Literal["closed", "open", "probing"]


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock."""

    at_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds until then, 0 when it has passed."""
        return max(0.0, self.at_s - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.at_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """`size_bytes` were moved. `detail` says what went wrong, for logs and metrics."""

    status: Status
    size_bytes: int = 0
    detail: str = ""


Report = Callable[[int, Outcome], None]
"""Hears the outcome of piece `index`, once. Called in any order, from the tier's threads or before the call that
started the work returns; it must not block or raise. kvstore/batch.py has one that collects."""


@dataclass(frozen=True, slots=True)
class Want:
    """An object to load. `target` is writable memory of exactly the object's size; it holds the object after "ok",
    and anything after anything else. Tiers are fastest with targets that begin on a page."""

    key: ObjectKey
    target: memoryview


@dataclass(frozen=True, slots=True)
class Put:
    """An object to save: `parts` laid end to end are its bytes (kvstore/block_format.py), header and all."""

    key: ObjectKey
    parts: Sequence[memoryview]

    @property
    def size_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class TierEvent:
    """An object became available, or is so no more. "removed" comes before the bytes are gone, and nothing is said of
    saves that failed. "cleared" (no key) stands for the removal of everything."""

    kind: Literal["stored", "removed", "cleared"]
    key: ObjectKey | None = None


EventSink = Callable[[TierEvent], None]
"""Called under a tier's lock, in the order in which it happened: it must not block, raise, or call the tier."""


DURATION_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histograms in TierStats, which have one more entry for what took longer."""


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a tier holds now, and cumulative counts of pieces by how they ended.

    `load_busy_s_total` and `save_busy_s_total` are sums over pieces of the time that each took once it was begun: with
    the bytes they give the rate that the cost of a load is predicted from; `load_durations` and `save_durations` count
    those that were "ok" by time (DURATION_BUCKETS_S). `corrupt` counts by the failed check.
    `unindexed` says that the tier may hold more than it knows of. Capacity 0 is one that the tier does not know.
    """

    tier: TierName
    objects: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    pinned_bytes: int = 0
    queued_loads: int = 0
    queued_saves: int = 0
    queued_bytes: int = 0
    loads: dict[Status, int] = {}
    saves: dict[Status, int] = {}
    load_bytes_total: int = 0
    save_bytes_total: int = 0
    load_busy_s_total: float = 0.0
    save_busy_s_total: float = 0.0
    evictions_total: int = 0
    evicted_bytes_total: int = 0
    corrupt: dict[str, int] = {}
    load_breaker: BreakerState = "closed"
    save_breaker: BreakerState = "closed"
    unindexed: bool = False
    breaker_trips_total: int = 0
    load_durations: list[int] = []
    save_durations: list[int] = []


class Tier(Protocol):
    """All methods may be called from any thread, and none of them blocks except `close`."""

    @property
    def name(self) -> TierName: ...

    def probe(self, keys: Sequence[ObjectKey], deadline: Deadline, report: Report) -> None:
        """Report for the whole of it, as index 0, how many leading `keys` are held: `size_bytes` is that number.

        It is a hint: an object may be gone or found corrupt when it is loaded.
        """
        ...

    def load(self, wants: Sequence[Want], deadline: Deadline, report: Report) -> None:
        """Read objects and check every byte of them. Pieces that are not begun at the deadline are "late"."""
        ...

    def save(self, puts: Sequence[Put], deadline: Deadline, report: Report) -> None:
        """Keep objects. "ok" comes when they can be found, also for those that could be already."""
        ...

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Count a use of each; the first are to be kept longest, so that a prefix goes tail first."""
        ...

    def pin(self, keys: Sequence[ObjectKey], seconds: float) -> int:
        """Keep objects from eviction for a time, as far as the tier's share for pins allows; return how many. 0
        seconds end a pin. Tiers whose eviction is not their own pin nothing."""
        ...

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Forget objects: from the return on they are misses."""
        ...

    def drop(self, namespace: bytes | None = None, owner: bytes | None = None) -> None:
        """Forget all objects of a namespace, of an owner, of both together, or all there are (neither)."""
        ...

    def stats(self) -> TierStats: ...

    def close(self, deadline: Deadline) -> None:
        """Take no more, finish what is under way until the deadline and cancel the rest. Memory that hanging I/O still
        uses may be reported later than that, or never."""
        ...
