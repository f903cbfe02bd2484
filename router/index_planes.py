"""The planes of the prefix index's table: what each of them tells of a block, one bit for each target."""

from __future__ import annotations

from kvstore.events.media import Tier

TIERS: tuple[Tier, ...] = ("device", "ram", "disk", "remote")
"""Those that a hit tells apart, in its order."""

PLANES: tuple[Tier, ...] = (*TIERS, "device_run", "device_end")
RUN, END = 4, 5
SPECULATIVE = len(PLANES)
"""The plane behind those of the tiers."""
