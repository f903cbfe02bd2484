"""Full blocks on their way from an engine's device into memory, where they can be found."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.block_format import Identity, seal
from kvstore.layout import ObjectLayout
from kvstore.manager.checking import CheckProcesses
from kvstore.manager.contract import DeviceMemory, Piece, StoredBlock
from kvstore.manager.cost import FetchCost
from kvstore.manager.requests import KnownRequest
from kvstore.ram.leases import Slot
from kvstore.ram.tier import RamTier
from kvstore.tier import Deadline

log = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20
"""Of blocks that are read at once."""

MAX_WAITING_BYTES = 4 << 30
"""Of blocks that wait to be read, on the device and kept from reuse: more are not stored. A long prompt fits."""


@dataclass(slots=True, eq=False)
class _Work:
    request: KnownRequest
    block: StoredBlock


class Saver:
    """`lock` guards the requests' counts; `on_unread(request)` is called under it when one that has ended has no unread
    blocks left. `on_saved` hears of each object that can be found in memory now."""

    def __init__(
        self,
        ram: RamTier,
        memory: DeviceMemory,
        lock: threading.RLock,
        on_unread: Callable[[KnownRequest], None],
        on_saved: Callable[[StoredBlock, ObjectLayout, Slot], None],
        count: Callable[[str], None],
        cost: FetchCost,
        writer: bytes,
        processes: CheckProcesses | None = None,
    ) -> None:
        self._processes = processes
        self._ram, self._memory, self._cost, self._writer = ram, memory, cost, writer
        self._on_unread, self._on_saved, self._count = on_unread, on_saved, count
        self._changed = threading.Condition(lock)
        self._reading = threading.Lock()
        self._waiting: deque[_Work] = deque()
        self._waiting_bytes = 0
        self._busy = self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-save", daemon=True)
        self._thread.start()

    @property
    def waiting_blocks(self) -> int:
        return len(self._waiting)

    def add(self, request: KnownRequest, blocks: Sequence[StoredBlock]) -> None:
        if request.parts.sliding:
            # Windows' blocks are reused once they are passed, which may be in the next step.
            self._try_save([_Work(request, block) for block in blocks], request.parts.sliding)
        if not request.parts.full:
            return
        with self._changed:
            for block in blocks:
                if self._closing or self._waiting_bytes >= MAX_WAITING_BYTES:
                    self._count("save_queue_full")
                    continue
                request.unread += 1
                self._waiting.append(_Work(request, block))
                self._waiting_bytes += request.parts.block_bytes
            self._changed.notify_all()

    def end(self, request: KnownRequest, keep_blocks: int) -> bool:
        """The request has ended. Return whether blocks of it are still to be read."""
        with self._changed:
            request.keep_blocks = keep_blocks
            if request.unread:
                kept = deque(
                    one for one in self._waiting if one.request is not request or one.block.index < keep_blocks
                )
                dropped = len(self._waiting) - len(kept)
                self._waiting = kept
                self._waiting_bytes -= dropped * request.parts.block_bytes
                request.unread -= dropped
            return request.unread > 0

    def flush(self, deadline: Deadline) -> bool:
        """Wait until all that was given is in memory or given up; return whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, deadline.left_s)

    def close(self) -> None:
        """On the return nothing is read any more; what waited is given up."""
        with self._changed:
            self._closing = True
            given_up, self._waiting = self._waiting, deque()
            self._waiting_bytes = 0
            self._changed.notify_all()
        self._read_off(given_up)
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next():
            self._try_save(batch, batch[0].request.parts.full)
            self._read_off(batch)

    def _next(self) -> list[_Work]:
        """Wait for blocks of one namespace; return none at the end."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._closing)
            batch: list[_Work] = []
            size = 0
            while self._waiting and size < BATCH_BYTES:
                if batch and self._waiting[0].request.parts is not batch[0].request.parts:
                    break
                batch.append(self._waiting.popleft())
                size += batch[-1].request.parts.block_bytes
            self._waiting_bytes -= size
            self._busy = bool(batch)
            return batch

    def _read_off(self, works: Sequence[_Work]) -> None:
        with self._changed:
            for count in Counter(id(work.request) for work in works).items():
                request = next(work.request for work in works if id(work.request) == count[0])
                request.unread -= count[1]
                if not request.unread and request.keep_blocks is not None:
                    self._on_unread(request)

    def _try_save(self, works: Sequence[_Work], layouts: Sequence[ObjectLayout]) -> None:
        try:
            self._save(works, layouts)
        except Exception:
            # Whatever the device or a block's data did: the blocks are not stored, and their owner gets them back.
            log.exception("blocks could not be saved")
            self._count("save_failed")

    def _save(self, works: Sequence[_Work], layouts: Sequence[ObjectLayout]) -> None:
        """Read and publish what memory does not hold yet. Objects are found only when they are whole."""
        slots: list[tuple[_Work, ObjectLayout, Slot]] = []
        try:
            for work in works:
                slots += [(work, layout, slot) for layout, slot in self._reserve(work, layouts)]
            pieces = [
                Piece(
                    layout,
                    (work.block.block_ids[layout.group],),
                    slot.view[layout.header_bytes :],
                    slot.address + layout.header_bytes,
                )
                for work, layout, slot in slots
            ]
            begun_s = time.monotonic()
            if pieces:
                with self._reading:
                    self._memory.read(pieces)
            size = sum(layout.object_bytes for _, layout, _ in slots)
            new = [(work.request.parts.number(layout), slot.offset, slot.key) for work, layout, slot in slots]
            while slots:
                work, layout, slot = slots[0]
                seal(slot.view, _identity(work, layout, slot), layout, self._writer)
                slots.pop(0)
                slot.publish()
                self._on_saved(work.block, layout, slot)
            self._cost.observe_save(size, time.monotonic() - begun_s)
            if self._processes is not None:
                self._processes.ask(new)
        finally:
            for _, _, slot in slots:
                slot.abandon()

    def _reserve(self, work: _Work, layouts: Sequence[ObjectLayout]) -> list[tuple[ObjectLayout, Slot]]:
        """Set memory aside for the objects of a block that are not there: all of them or none."""
        request = work.request
        found: list[tuple[ObjectLayout, Slot]] = []
        for layout in layouts:
            key = layout.key(request.parts.digest, request.owner, work.block.key)
            if work.block.block_ids[layout.group] == 0:
                self._count("save_passed")
            elif not self._ram.held(key):
                slot = self._ram.reserve(key, layout.object_bytes)
                if slot is None:
                    self._count("save_no_room")
                    for _, taken in found:
                        taken.abandon()
                    return []
                found.append((layout, slot))
        return found


def _identity(work: _Work, layout: ObjectLayout, slot: Slot) -> Identity:
    block = work.block
    first_token = block.index * work.request.parts.block_size
    return Identity(slot.key, block.parent, first_token, array("I", block.token_ids))
