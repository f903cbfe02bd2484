"""What a store tells of itself."""

from __future__ import annotations

import msgspec

from kvstore.tier import TierName, TierStats


class QueueStats(msgspec.Struct, frozen=True):
    """Of what is on its way to one tier. `ended` counts by how: tiers' outcomes, and overflow, late, evicted, and
    unadmitted for what was not taken under pressure."""

    objects: int
    size_bytes: int
    ended: dict[str, int]


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """`clients` are cumulative counts over all engines of the process, `fetch_rates` bytes a second as measured."""

    tiers: list[TierStats]
    queues: dict[TierName, QueueStats]
    clients: dict[str, int]
    fetching: int
    overdue_leases: int
    fetch_rates: dict[TierName, float]
