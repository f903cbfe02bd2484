"""A process that uses a shared directory of tests/kvstore/test_shared_directory.py, as another host does.

python -m tests.support.directory_sharer ROOT OBJECTS
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvstore.disk import upkeep
from kvstore.disk.tier import DiskTier
from tests.support.tier_contract import SIZE, loaded, save, soon, statuses


def main() -> None:
    """Do what is asked on standard input, a line each, and say what came of it: save FIRST STOP, load FIRST STOP, or
    stats."""
    root, objects = Path(sys.argv[1]), int(sys.argv[2])
    upkeep.LOCK_RETRY_S = upkeep.REWALK_S = 0.05
    tier = DiskTier(root, objects * SIZE, min_free_bytes=0, shared=True)
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *numbers = line.split()
        wanted = range(*(int(number) for number in numbers)) if numbers else range(0)
        match verb:
            case "save":
                print(*statuses(save(tier, wanted)), flush=True)
            case "load":
                print(*loaded(tier, wanted), flush=True)
            case "stats":
                print(tier.stats().objects, tier.stats().evictions_total, flush=True)
    tier.close(soon())


if __name__ == "__main__":
    main()
