"""What an operator may ask of an engine's store, and what is told. Prompts are named by their scope and block keys."""

from __future__ import annotations

import msgspec

from kvstore.manager.stats import StoreStats
from kvstore.tier import TierName

MAX_SECONDS = 86_400.0
"""Of a pin: what is to be kept longer is pinned again."""

MAX_FLUSH_S = 60.0
LOOK_UP_S = 2.0
PREFETCH_S = 60.0


class KVStats(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Tell what the tiers hold and have done."""


class KVLookUp(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Tell how many leading blocks each tier holds."""

    scope: bytes
    keys: list[bytes]


class KVPrefetch(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Begin to bring blocks into memory; tell how many objects are fetched."""

    scope: bytes
    keys: list[bytes]


class KVPin(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Keep blocks from eviction; 0 seconds end that. Tell how many objects each tier keeps."""

    scope: bytes
    keys: list[bytes]
    seconds: float


class KVDrop(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Forget, in all tiers: the blocks `keys` of `scope`, without keys all that is the scope's owner's, and without a
    scope everything."""

    scope: bytes | None = None
    keys: list[bytes] | None = None


class KVQuota(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Bound what the owner of `scope` may have in each tier that evicts by itself; None: as everybody."""

    scope: bytes
    limit_bytes: int | None


class KVFlush(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Write everything that waits; tell whether it was done in time."""

    timeout_s: float


class KVNewWeights(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The engine's weights were changed: forget its prefix cache, and keep apart what was stored before. Engines that
    got the same weights share what they store when they are told the same `epoch`; None draws one."""

    epoch: str | None = None


KVVerb = KVStats | KVLookUp | KVPrefetch | KVPin | KVDrop | KVQuota | KVFlush | KVNewWeights


class KVTold(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of one engine, `engine` being its target's id where there are several. What was not asked is not
    there."""

    engine: str | None = None
    stats: StoreStats | None = None
    blocks: dict[TierName, int] | None = None
    objects: int | None = None
    pinned: dict[TierName, int] | None = None
    done: bool | None = None
    epoch: str | None = None
