"""What a store tells of itself: plain values, which travel as they are."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvstore.tier import TierName, TierStats

MAX_OWNERS = 1000
"""Of those that have most, in each tier."""


class QueueStats(msgspec.Struct, frozen=True):
    """Of what is on its way to one tier. `ended` counts by how: tiers' outcomes, and overflow, late, evicted, and
    unadmitted for what was not taken under pressure."""

    objects: int
    size_bytes: int
    ended: dict[str, int]


class OwnerUse(msgspec.Struct, frozen=True):
    """What one tenant has in a tier, and may have; None is no bound. `owner` is 32 hex digits."""

    owner: str
    used_bytes: int
    quota_bytes: int | None


class FetchTotal(msgspec.Struct, frozen=True):
    """Cumulative: tokens whose blocks were loaded to the device, and the time that those loads took. Routers compute
    with them: they are checked where they are decoded."""

    tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    seconds: Annotated[float, msgspec.Meta(ge=0, lt=1e12)]


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """`clients` are cumulative counts over all engines of the process, `fetch_rates` bytes a second as measured.

    `hits` are blocks that look-ups found in a tier, `misses` those that neither it nor a faster one had. `leases` are
    readers of memory now, `prefill_rate` is tokens a second.
    """

    tiers: list[TierStats]
    queues: dict[TierName, QueueStats]
    clients: dict[str, int]
    fetching: int
    overdue_leases: int
    fetch_rates: dict[TierName, float]
    hits: dict[TierName, int] = {}
    misses: dict[TierName, int] = {}
    leases: int = 0
    prefill_rate: float | None = None
    fetched: dict[TierName, FetchTotal] = {}
