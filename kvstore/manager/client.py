"""One engine's client of the store (kvstore/manager/contract.py says what it promises)."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from kvstore.block_format import WRITER_BYTES
from kvstore.keys import owner_of
from kvstore.layout import ObjectLayout
from kvstore.manager.checking import CheckProcesses
from kvstore.manager.contract import DeviceMemory, Found, Loaded, Released, StoredBlock
from kvstore.manager.cost import FetchCost
from kvstore.manager.fetching import Fetches
from kvstore.manager.loading import Loader
from kvstore.manager.looking import LOOK_UP_S, Look, Looker
from kvstore.manager.parts import BlockParts
from kvstore.manager.requests import KnownRequest
from kvstore.manager.saving import Saver
from kvstore.object_key import ObjectKey
from kvstore.ram.leases import Slot
from kvstore.ram.tier import RamTier
from kvstore.tier import Deadline, Tier

OnSaved = Callable[[StoredBlock, ObjectKey, int], None]


class EngineClient:
    """`on_saved` hears of each object that came into memory: what is written further from there is the store's affair.
    `min_blocks` and `always_load` are the operator's: loads that are shorter, or that do not pay, are not begun."""

    def __init__(
        self,
        parts: BlockParts,
        memory: DeviceMemory,
        wake: Callable[[], None],
        *,
        ram: RamTier,
        lower: Sequence[Tier],
        fetches: Fetches,
        on_saved: OnSaved,
        min_blocks: int,
        always_load: bool,
        check_processes: int = 0,
    ) -> None:
        self._parts = parts
        self._on_saved, self._wake = on_saved, wake
        self._min_blocks, self._always_load = min_blocks, always_load
        self.cost = FetchCost()
        self._lock = threading.RLock()
        self._requests: dict[str, KnownRequest] = {}
        self._ended: list[Loaded | Released] = []
        self._counts: Counter[str] = Counter()
        self._looker = Looker(ram, lower, self._looked)
        self._processes: CheckProcesses | None = None
        if check_processes:
            self._processes = CheckProcesses(ram.arena.fd, parts.all, check_processes)
        writer = secrets.token_bytes(WRITER_BYTES)
        self._saver = Saver(
            ram, memory, self._lock, self._unread, self._saved, self._count, self.cost, writer, self._processes
        )
        self._loader = Loader(ram, lower, fetches, memory, self.cost, self._loaded, self._processes)

    def use_namespace(self, parts: BlockParts) -> None:
        """From now on this is whose KV the device has. Requests that began before it save nothing more."""
        with self._lock:
            self._parts = parts
            for request in self._requests.values():
                request.saves, request.look = False, None

    # As an engine's loop calls it

    def look_up(
        self, request_id: str, scope: bytes, keys: Sequence[bytes], start_block: int = 0, *, save: bool = True
    ) -> None:
        with self._lock:
            request = self._requests.get(request_id)
            if request is None:
                request = self._requests[request_id] = KnownRequest(request_id, scope, self._parts, saves=save)
            request.keys = list(keys)
            if request.parts is not self._parts or start_block >= len(keys):
                request.look = None
                return
            look = Look(request.parts, request.owner, request.keys, start_block, Deadline.after(LOOK_UP_S))
            request.look = look
            self._counts["look_ups"] += 1
        self._looker.begin(look)

    def found(self, request_id: str, start_block: int, num_blocks: int) -> Found | None:
        with self._lock:
            request = self._requests.get(request_id)
            look = None if request is None else request.look
            if look is None or look.start > start_block:
                return Found(())
            if not look.done and not look.deadline.passed:
                return None
            if not look.done and look.parts.sliding:
                return Found(())
            tiers = tuple(look.tiers[start_block - look.start : num_blocks - look.start])
            if look.parts.sliding and look.end > num_blocks:
                return Found(())  # what windows see was looked up for another end
        worth = len(tiers)
        if not self._always_load:
            worth = self.cost.worthwhile(tiers, look.parts.block_bytes, look.parts.block_size)
        if worth < max(1, self._min_blocks) or (look.parts.sliding and worth < len(tiers)):
            return Found(())
        return Found(tiers[:worth])

    def load(self, request_id: str, start_block: int, block_ids: Sequence[Sequence[int]]) -> None:
        with self._lock:
            request = self._requests[request_id]
            look = request.look
            assert look is not None, "loaded without a look-up"
            first = start_block - look.start
            tiers = look.tiers[first : first + len(block_ids[0])]
            self._counts["loads"] += 1
            self._counts["looked_blocks"] += len(tiers)
        self._loader.add(request, start_block, block_ids, tiers)

    def save(self, blocks: Sequence[StoredBlock]) -> None:
        by_request: dict[str, list[StoredBlock]] = {}
        for block in blocks:
            by_request.setdefault(block.request_id, []).append(block)
        for request_id, own in by_request.items():
            with self._lock:
                request = self._requests.get(request_id)
                if request is None:
                    scope = own[0].scope
                    request = self._requests[request_id] = KnownRequest(request_id, scope, self._parts)
            if request.saves:
                self._saver.add(request, own)

    def finish(self, request_id: str, keep_blocks: int) -> bool:
        with self._lock:
            request = self._requests.pop(request_id, None)
            return request is not None and self._saver.end(request, keep_blocks)

    def poll(self) -> Sequence[Loaded | Released]:
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        self.cost.observe_prefill(tokens, seconds)

    def close(self) -> None:
        self._saver.close()
        self._loader.close()
        if self._processes is not None:
            self._processes.close()

    # From the store's threads

    def _looked(self, look: Look) -> None:
        with self._lock:
            self._counts["asked_blocks"] += len(look.objects)
            for tier in dict.fromkeys(look.tiers):
                self._counts[f"found_{tier}"] += look.tiers.count(tier)
        self._wake()

    def _saved(self, block: StoredBlock, layout: ObjectLayout, slot: Slot) -> None:
        self._count("saved_objects")
        self._on_saved(block, slot.key, layout.object_bytes)

    def _unread(self, request: KnownRequest) -> None:
        self._ended.append(Released(request.request_id))
        self._wake()

    def _loaded(self, request: KnownRequest, loaded: Loaded) -> None:
        with self._lock:
            if request.look is not None and loaded.error is not None:
                request.look.tiers.clear()  # it is not found again
            self._counts["loaded_blocks"] += loaded.blocks
            if loaded.error is not None:
                self._counts["loads_cut"] += 1
            self._ended.append(loaded)
        self._wake()

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    # What others ask

    @property
    def parts(self) -> BlockParts:
        return self._parts

    def counts(self) -> dict[str, int]:
        """Return cumulative counts; `save_waiting` is of now."""
        with self._lock:
            return {**self._counts, "save_waiting": self._saver.waiting_blocks, "requests": len(self._requests)}

    def flush(self, deadline: Deadline) -> bool:
        """Wait until what was saved is in memory or given up; return whether that came in time."""
        return self._saver.flush(deadline)

    def keys_of(self, scope: bytes, blocks: Sequence[bytes]) -> list[ObjectKey]:
        """Return the keys of all objects of blocks."""
        return self._parts.keys(owner_of(scope), blocks, self._parts.all)
