"""The store of one process: its tiers, and the engines that use them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.books import Quotas
from kvstore.codec import ObjectCodec
from kvstore.disk.tier import DiskTier
from kvstore.eviction import LRU, Adaptive, Eviction, S3Fifo
from kvstore.manager.admission import PRESSURE, Sightings
from kvstore.manager.behind import WriteBehind
from kvstore.manager.client import EngineClient
from kvstore.manager.config import DirectorySpec, StoreConfig
from kvstore.manager.contract import DeviceMemory, StoredBlock
from kvstore.manager.fetching import Fetches, OnFetched
from kvstore.manager.figures import MAX_OWNERS, FetchTotal, OwnerUse, QueueStats, StoreStats
from kvstore.manager.parts import BlockParts
from kvstore.namespace import Namespace
from kvstore.object_key import ObjectKey
from kvstore.ram.tier import RamTier
from kvstore.remote.tier import RemoteTier
from kvstore.tier import Deadline, EventSink, Outcome, Tier, TierEvent, TierName

log = logging.getLogger(__name__)

OVERDUE_S = 60.0
"""A lease that is older is told of: somebody hangs, or has forgotten it."""

TierSink = Callable[[TierName, TierEvent], None]

_POLICIES: dict[str, Callable[[], Eviction[ObjectKey]]] = {"lru": LRU, "s3fifo": S3Fifo, "adaptive": Adaptive}


class KVStore:
    """Raises TierUnusableError when a tier cannot be opened. `on_event` hears of every object that comes to a tier or
    goes, as kvstore/tier.py says of sinks."""

    def __init__(self, config: StoreConfig, *, on_event: TierSink | None = None) -> None:
        self._config = config
        self._on_event = on_event
        quotas = Quotas(default=config.quota_bytes)
        self.ram = RamTier(
            config.ram_bytes, quotas=quotas, policy=_POLICIES[config.eviction], on_event=self._sink("ram")
        )
        self.lower: list[Tier] = []
        self._codec = None if config.secret_file is None else _codec(Path(config.secret_file))
        try:
            if config.disk is not None:
                self.lower.append(self._directory(config.disk, "disk", several=config.local_engines > 1))
            if config.shared is not None:
                self.lower.append(self._directory(config.shared, "remote", several=True))
            if config.server is not None:
                self.lower.append(RemoteTier(config.server, codec=self._codec, on_event=self._sink("remote")))
        except BaseException:
            self._close_tiers(Deadline.after(1.0))
            raise
        self._behind = [WriteBehind(self.ram, tier) for tier in self.lower]
        self._fetches = Fetches(self.ram)
        self._sightings = Sightings()
        self._clients: list[EngineClient] = []
        self._lock = threading.Lock()

    def attach(self, namespace: Namespace, memory: DeviceMemory, wake: Callable[[], None]) -> EngineClient:
        """Return the client of an engine whose KV is of `namespace`. The engine closes it before the store."""
        for tier in self.lower:
            if isinstance(tier, DiskTier):
                tier.describe(namespace)
        client = EngineClient(
            BlockParts(namespace),
            memory,
            wake,
            ram=self.ram,
            lower=self.lower,
            fetches=self._fetches,
            on_saved=self._saved,
            min_blocks=self._config.min_blocks,
            always_load=self._config.always_load,
            check_processes=self._config.check_processes,
        )
        with self._lock:
            self._clients.append(client)
        return client

    def close(self, deadline: Deadline) -> None:
        """Write what is queued until the deadline, and close the tiers."""
        for behind in self._behind:
            behind.close(deadline)
        self._close_tiers(deadline)

    def _close_tiers(self, deadline: Deadline) -> None:
        for tier in [*self.lower, self.ram]:
            tier.close(deadline)

    # Administration

    def stats(self) -> StoreStats:
        overdue = self.ram.overdue(OVERDUE_S)
        for holder, age_s in overdue[:8]:
            log.warning("%s has held stored KV for %.0f s", holder, age_s)
        counts: dict[str, int] = {}
        rates: dict[TierName, float] = {}
        fetched: dict[TierName, FetchTotal] = {}
        for client in list(self._clients):
            for what, count in client.counts().items():
                counts[what] = counts.get(what, 0) + count
            rates.update({tier: client.cost.rates[tier] for tier in set(client.cost.measured)})
            for name, (size_bytes, seconds) in list(client.cost.fetched.items()):
                known = fetched.get(name, FetchTotal(0, 0.0))
                tokens = size_bytes * client.parts.block_size // client.parts.block_bytes
                fetched[name] = FetchTotal(known.tokens + tokens, known.seconds + seconds)
        hits: dict[TierName, int] = {tier.name: counts.pop(f"found_{tier.name}", 0) for tier in self.tiers()}
        left, misses = counts.pop("asked_blocks", 0), {}
        for name, found in hits.items():
            left -= found
            misses[name] = left
        prefill = [client.cost.prefill_rate for client in list(self._clients) if client.cost.prefill_rate is not None]
        return StoreStats(
            tiers=[tier.stats() for tier in self.tiers()],
            queues={behind.tier.name: QueueStats(*behind.figures()) for behind in self._behind},
            clients=counts,
            fetching=len(self._fetches),
            overdue_leases=len(overdue),
            fetch_rates=rates,
            hits=hits,
            misses=misses,
            fetched=fetched,
            leases=self.ram.num_leases,
            prefill_rate=max(prefill, default=None),
        )

    @property
    def encrypts(self) -> bool:
        """Whether what leaves memory is encrypted."""
        return self._codec is not None

    def tiers(self, only: TierName | None = None) -> list[Tier]:
        """Return the tiers, the fastest first, or the one of this name: none where there is no such tier."""
        return [tier for tier in (self.ram, *self.lower) if only in (None, tier.name)]

    def owners(self) -> dict[TierName, list[OwnerUse]]:
        """Return what tenants have in the tiers that count it, those that have most first."""
        found: dict[TierName, list[OwnerUse]] = {}
        for tier in self.tiers():
            if isinstance(tier, RamTier | DiskTier):
                uses = sorted(tier.owners(), key=lambda one: -one[1])[:MAX_OWNERS]
                found[tier.name] = [OwnerUse(owner.hex(), used, limit) for owner, used, limit in uses]
        return found

    def held(
        self, client: EngineClient, scope: bytes, blocks: Sequence[bytes], deadline: Deadline
    ) -> dict[TierName, int]:
        """Return how many leading blocks each tier holds. Waits until the deadline at most."""
        keys, parts = client.keys_of(scope, blocks), len(client.parts.all)
        leading: dict[TierName, int] = {}
        for tier in [self.ram, *self.lower]:
            told = threading.Event()

            def report(_: int, outcome: Outcome, tier: Tier = tier, told: threading.Event = told) -> None:
                leading[tier.name] = outcome.size_bytes // parts
                told.set()

            tier.probe(keys, deadline, report)
            told.wait(deadline.left_s)
        return dict(leading)

    def prefetch(
        self,
        client: EngineClient,
        scope: bytes,
        blocks: Sequence[bytes],
        deadline: Deadline,
        on_fetched: OnFetched = lambda key, found: None,
    ) -> int:
        """Bring blocks into memory; return how many objects were asked for. `on_fetched` hears of each."""
        layouts = client.parts.all
        sizes = [layout.object_bytes for _ in blocks for layout in layouts]
        wanted = [
            (key, size)
            for key, size in zip(client.keys_of(scope, blocks), sizes, strict=True)
            if not self.ram.held(key)
        ]
        self._fetches.fetch(wanted, self.lower, deadline, on_fetched)
        return len(wanted)

    def pin(
        self,
        client: EngineClient,
        scope: bytes,
        blocks: Sequence[bytes],
        seconds: float,
        only: TierName | None = None,
    ) -> dict[TierName, int]:
        """Keep blocks from eviction; 0 seconds end that. Return how many objects each tier keeps."""
        keys = client.keys_of(scope, blocks)
        return {tier.name: tier.pin(keys, seconds) for tier in self.tiers(only)}

    def delete(self, client: EngineClient, scope: bytes, blocks: Sequence[bytes], only: TierName | None = None) -> None:
        """Forget blocks in all tiers, or in one."""
        keys = client.keys_of(scope, blocks)
        for tier in self.tiers(only):
            tier.delete(keys)

    def drop(self, namespace: bytes | None = None, owner: bytes | None = None, only: TierName | None = None) -> None:
        """Forget a namespace, an owner, both together or (neither) everything, in all tiers or in one."""
        for behind in self._behind:
            if only in (None, behind.tier.name):
                behind.forget()
        for tier in self.tiers(only):
            tier.drop(namespace, owner)

    def set_quota(self, owner: bytes, limit_bytes: int | None, only: TierName | None = None) -> None:
        for tier in self.tiers(only):
            if isinstance(tier, RamTier | DiskTier):
                tier.set_quota(owner, limit_bytes)

    def flush(self, deadline: Deadline) -> bool:
        """Wait until what the engines saved is written everywhere; return whether it was in time."""
        saved = all(client.flush(deadline) for client in list(self._clients))
        return saved and all(behind.flush(deadline) for behind in self._behind)

    # Inside

    def _saved(self, block: StoredBlock, key: ObjectKey, size_bytes: int) -> None:
        """An object is in memory: below it goes what is worth the room."""
        known = self._sightings.note(block.key) > 1 or self._sightings.count(block.parent) > 1
        for behind in self._behind:
            stats = behind.tier.stats()
            pressed = stats.capacity_bytes and stats.used_bytes > PRESSURE * stats.capacity_bytes
            if pressed and not known:
                behind.count("unadmitted")
            else:
                behind.add(key, size_bytes)

    def _sink(self, name: TierName) -> EventSink | None:
        on_event = self._on_event
        return None if on_event is None else lambda event: on_event(name, event)

    def _directory(self, spec: DirectorySpec, name: TierName, *, several: bool) -> DiskTier:
        tier = DiskTier(
            Path(spec.path),
            spec.capacity_bytes,
            min_free_bytes=spec.min_free_bytes,
            quotas=Quotas(default=self._config.quota_bytes),
            policy=_POLICIES[self._config.eviction],
            on_event=self._sink(name),
            shared=several,
            codec=self._codec,
        )
        tier.name = name
        return tier


def _codec(secret_file: Path) -> ObjectCodec:
    from kvstore.encryption import AesGcmCodec, read_secret  # needs the extra `encryption`

    return AesGcmCodec(read_secret(secret_file))
