"""Opens the KV store that an engine's settings ask for, and attaches the engine to it."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.store_port import StorePort
from engine.kv.tier_blocks import TierBlocks
from engine.protocol import EngineInfo, KVTierInfo
from kvstore.disk.tier import DiskTier
from kvstore.errors import TierUnusableError
from kvstore.manager.client import EngineClient
from kvstore.manager.config import StoreConfig, parse_store
from kvstore.manager.parts import BlockParts
from kvstore.manager.store import KVStore
from kvstore.namespace import GroupShape, Namespace
from kvstore.remote.tier import RemoteTier
from kvstore.tier import Deadline, Tier

if TYPE_CHECKING:
    from engine.runner.kv_memory import KVMemory

log = logging.getLogger(__name__)

MAX_CHECK_PROCESSES = 8
"""One checks about 9 GB/s; a device takes up to 55."""

CLOSE_S = 10.0
"""Time to write what is queued when the engine ends. What is left is computed again one day."""


def store_config(config: EngineConfig) -> StoreConfig | None:
    """Return the store that the settings ask for, None for none. Raises ConfigError."""
    try:
        parsed = parse_store(config.kv_store)
    except ValueError as error:
        raise ConfigError(f"kv_store {error}") from None
    if parsed is None:
        return None
    if not config.prefix_cache:
        raise ConfigError("kv_store needs the prefix cache", hint="Leave prefix_cache on.")
    return msgspec.structs.replace(
        parsed,
        local_engines=config.local_engines,
        quota_bytes=config.kv_quota_bytes,
        secret_file=config.kv_secret_file,
        always_load=config.kv_load == "always",
    )


def _check_processes(device: str) -> int:
    """A CPU computes about as fast as a thread checks; for a GPU checks would be what loads wait for."""
    return 0 if device == "cpu" else max(1, min(MAX_CHECK_PROCESSES, (os.cpu_count() or 1) // 2))


def namespace_of(info: EngineInfo, weights_epoch: str = "") -> Namespace:
    """Return whose KV an engine's is. Everything that decides a byte of it is in there."""
    return Namespace(
        model=info.architecture,
        weights_digest=info.weights_digest,
        weights_epoch=weights_epoch,
        kv_dtype=info.kv_dtype or info.dtype,
        rope=info.config_digest,
        groups=tuple(
            GroupShape(spec.kind, spec.layers, spec.kv_heads, spec.head_dim, window_tokens=spec.window_tokens)
            for spec in info.kv_groups
        ),
        block_size=info.block_size,
        numerics=info.numerics_fingerprint,
    )


@dataclass
class OpenStore:
    """A store with one engine. `tier_blocks` tells what the tiers hold, None for models with sliding windows: a block
    alone does not tell whether their windows are there too. Closed after the engine's last step, and before its memory
    is given up."""

    store: KVStore
    client: EngineClient
    port: StorePort
    memory: KVMemory
    info: EngineInfo
    tier_blocks: TierBlocks | None = None
    weights_epoch: str = ""

    def new_weights(self, epoch: str | None = None) -> str:
        """The weights were changed: nothing of before is found from now on, or stored. Return the epoch, which is a
        random one unless the caller names it: engines that are given the same weights share KV under the same name."""
        self.weights_epoch = secrets.token_hex(16) if epoch is None else epoch
        parts = BlockParts(namespace_of(self.info, self.weights_epoch))
        self.client.use_namespace(parts)
        if self.tier_blocks is not None:
            self.tier_blocks.use_namespace(parts)
        return self.weights_epoch

    def close(self) -> None:
        self.client.close()
        self.store.close(Deadline.after(CLOSE_S))
        self.memory.close()


def tiers_of(opened: OpenStore) -> tuple[KVTierInfo, ...]:
    """Return what the store's tiers are, as they were opened."""
    return tuple(_tier_info(tier, encrypts=opened.store.encrypts) for tier in opened.store.tiers())


def _tier_info(tier: Tier, *, encrypts: bool) -> KVTierInfo:
    capacity = tier.stats().capacity_bytes
    if isinstance(tier, DiskTier):
        return KVTierInfo(
            tier=tier.name,
            capacity_bytes=capacity,
            place=str(tier.place.root),
            encrypted=encrypts,
            is_direct=tier.direct,
        )
    if isinstance(tier, RemoteTier):
        return KVTierInfo(
            tier=tier.name,
            capacity_bytes=capacity,
            place=str(tier.address),
            encrypted=encrypts,
            answers=not tier.refusal,
        )
    return KVTierInfo(tier=tier.name, capacity_bytes=capacity)


def open_store(config: EngineConfig, info: EngineInfo, memory: KVMemory, wake: Callable[[], None]) -> OpenStore | None:
    """Return the store of the settings with this engine in it. Raises ConfigError when a tier cannot be used."""
    wanted = store_config(config)
    if wanted is None:
        return None
    slides = any(spec.window_tokens is not None for spec in info.kv_groups)
    blocks = None if slides else TierBlocks(BlockParts(namespace_of(info)))
    try:
        store = KVStore(
            msgspec.structs.replace(wanted, check_processes=_check_processes(info.device)),
            on_event=None if blocks is None else blocks.hear,
        )
    except TierUnusableError as error:
        raise ConfigError(f"kv_store: {error}") from None
    memory.pin(store.ram.arena.view(0, store.ram.arena.capacity_bytes))
    client = store.attach(namespace_of(info), memory, wake)
    return OpenStore(store, client, StorePort(client, info.block_size, slides=slides), memory, info, blocks)
