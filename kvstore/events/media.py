"""Names of tiers: ours, and what publishers call them."""

from __future__ import annotations

from typing import Literal

Tier = Literal["device", "ram", "disk", "remote", "device_run", "device_end"]
"""The device of an engine with sliding windows has two: a hit there is a run of blocks from a prompt's start, of which
the last is an end as well (engine/kv/event_log.py)."""

MEDIUM_OF: dict[Tier, str] = {
    "device": "GPU",
    "ram": "CPU",
    "disk": "DISK",
    "remote": "EXTERNAL",
    "device_run": "GPU_RUN",
    "device_end": "GPU_END",
}
"""What we publish, whatever the device is: the names that consumers know, and two that only ours do."""

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
    "GPU_RUN": "device_run",
    "GPU_END": "device_end",
}


def tier_of(medium: str | None) -> Tier | None:
    """Return the tier of a medium, None for one that nobody has told us of. No medium is the device."""
    return "device" if medium is None else _TIERS.get(medium.upper())
