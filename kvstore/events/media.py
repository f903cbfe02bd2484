"""Names of tiers: ours, and what publishers call them."""

from __future__ import annotations

from typing import Literal

Tier = Literal["device", "ram", "disk", "remote"]

MEDIUM_OF: dict[Tier, str] = {"device": "GPU", "ram": "CPU", "disk": "DISK", "remote": "EXTERNAL"}
"""What we publish, whatever the device is: the names that consumers know."""

_TIERS: dict[str, Tier] = {
    "GPU": "device",
    "CPU": "ram",
    "CPU_PINNED": "ram",
    "CPU_TIER1": "ram",
    "DISK": "disk",
    "SSD": "disk",
    "STORAGE": "disk",
    "EXTERNAL": "remote",
    "REMOTE": "remote",
}


def tier_of(medium: str | None) -> Tier | None:
    """Return the tier of a medium, None for one that nobody has told us of. No medium is the device."""
    return "device" if medium is None else _TIERS.get(medium.upper())
