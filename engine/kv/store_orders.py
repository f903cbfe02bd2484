"""What an operator may ask of an engine's KV store, and the answers. Plain values of the wire: they know no store.

A prompt is a scope and its token ids, u32 little-endian. An owner is the first half of a scope. `tier` None means all
tiers. Waits are bounded by MAX_WAIT_S, which is well within the time that a client waits for an answer.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from kvstore.manager.figures import OwnerUse, StoreStats
from kvstore.tier import TierName

MAX_WAIT_S = 15.0
MAX_PIN_S = 7 * 86_400.0


class ReadStats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """-> StoreReport"""


class LookUp(msgspec.Struct, frozen=True, kw_only=True, tag="lookup"):
    """-> PromptHeld"""

    scope: bytes
    tokens: bytes


class Prefetch(msgspec.Struct, frozen=True, kw_only=True, tag="prefetch"):
    """Bring a prompt's blocks to memory, and wait for them so long. -> Prefetched"""

    scope: bytes
    tokens: bytes
    wait_s: float


class Pin(msgspec.Struct, frozen=True, kw_only=True, tag="pin"):
    """Keep a prompt's blocks from eviction, as far as the share of a tier for pins goes; 0 seconds end it. -> Kept"""

    scope: bytes
    tokens: bytes
    seconds: float
    tier: TierName | None = None


class Drop(msgspec.Struct, frozen=True, kw_only=True, tag="drop"):
    """Forget a prompt (with a scope), what an owner has, or everything (neither). -> Done"""

    scope: bytes | None = None
    tokens: bytes = b""
    owner: bytes | None = None
    tier: TierName | None = None


class SetQuota(msgspec.Struct, frozen=True, kw_only=True, tag="quota"):
    """`limit_bytes` None ends what was set before: the setting's default holds again. -> Done"""

    owner: bytes
    limit_bytes: int | None
    tier: TierName | None = None


class Flush(msgspec.Struct, frozen=True, kw_only=True, tag="flush"):
    """Wait until all that was saved is written. -> Flushed"""

    wait_s: float


class NewWeights(msgspec.Struct, frozen=True, kw_only=True, tag="weights"):
    """The weights were changed. Engines that were given the same ones get the same epoch. -> WeightsEpoch"""

    epoch: str


StoreOrder = ReadStats | LookUp | Prefetch | Pin | Drop | SetQuota | Flush | NewWeights


class StoreReport(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """`owners` of the tiers that count by tenant."""

    stats: StoreStats
    owners: dict[TierName, list[OwnerUse]]
    weights_epoch: str


class PromptHeld(msgspec.Struct, frozen=True, kw_only=True, tag="lookup"):
    """Leading full blocks of a prompt on the device, and in each tier by itself."""

    block_size: int
    blocks: int
    device: int
    tiers: dict[TierName, int]


class Prefetched(msgspec.Struct, frozen=True, kw_only=True, tag="prefetch"):
    """`ram_blocks` lead in memory now, of `blocks`; `objects` were asked for, and `fetched` have come."""

    blocks: int
    ram_blocks: int
    objects: int
    fetched: int


class Kept(msgspec.Struct, frozen=True, kw_only=True, tag="pin"):
    """Objects that each tier keeps now; a block has one or more. 0 where a tier cannot keep any."""

    blocks: int
    objects: dict[TierName, int]


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    tiers: list[TierName]


class Flushed(msgspec.Struct, frozen=True, kw_only=True, tag="flush"):
    in_time: bool


class WeightsEpoch(msgspec.Struct, frozen=True, kw_only=True, tag="weights"):
    """The epoch from now on; "" where there is no store."""

    epoch: str


StoreAnswer = StoreReport | PromptHeld | Prefetched | Kept | Done | Flushed | WeightsEpoch


class StoreAdmin(Protocol):
    """An engine that takes such orders."""

    async def order_store(self, order: StoreOrder) -> StoreAnswer:
        """Raise UnsupportedError for an engine without a store, or without this tier."""
        ...

    async def reset_prefix_cache(self) -> None: ...
