"""Copies between a CUDA device's KV cache and the host's memory, beside a running engine.

Large chunks go one by one, many in one call of the driver: the copy engines do all of it, and no multiprocessor is
taken from the engine. Small ones, which would cost a copy engine more than their bytes, are packed by a kernel beside
the KV cache and go as one copy for each object. Host memory that is pinned is copied in place, other memory by way of a
pinned buffer.

Order. A block is read when the host has collected the results of the step that filled it: that step's event has
passed, so any stream sees it. A block is written before the host lets a step use it: `write` returns behind the event
that ends the copies, so every kernel launched later sees it. No stream of the engine waits here or is waited for, and
only the calling thread waits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.kv_objects import GRAIN_BYTES, pack_chunks, unpack_chunks
from engine.runner.cuda_driver import Addresses, CudaDriver
from engine.runner.kv_cache import available_memory_bytes
from engine.runner.kv_places import Chunks, address_of

BATCH_BYTES = 16 << 20
"""Copied at a time: each direction has two buffers of this size, so that the host fills or empties one meanwhile."""

FIRST_BATCH_BYTES = 4 << 20

DIRECT_BYTES = 64 << 10
"""Smaller chunks are packed."""

PIN_BYTES = 1 << 30
"""Host memory is pinned by pieces of this size; no object lies across the borders of a RAM tier's slabs, whose size
divides it."""


class PinnedRanges:
    """Host memory that a device reaches, as ranges of addresses."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._ranges: list[tuple[int, int]] = []

    def add(self, memory: memoryview) -> int:
        """Pin memory from its start on, at most half of what the machine has left; return how many bytes."""
        start, done = address_of(memory), 0
        limit = min(memory.nbytes, available_memory_bytes() // 2)
        while done < limit:
            size = min(PIN_BYTES, limit - done)
            if not self._driver.pin(start + done, size):
                break
            self._ranges.append((start + done, start + done + size))
            done += size
        return done

    def contain(self, addresses: Addresses, sizes: Addresses) -> NDArray[np.bool_]:
        """Return which pieces of memory lie in a range whole."""
        inside = np.zeros(len(addresses), np.bool_)
        for start, stop in self._ranges:
            inside |= (addresses >= start) & (addresses + sizes <= stop)
        return inside

    def clear(self) -> None:
        while self._ranges:
            self._driver.unpin(self._ranges.pop()[0])


class CudaCopies:
    """`engine.runner.kv_memory.Copies` of one device. To be made in a thread that uses the device already."""

    def __init__(
        self,
        device: torch.device,
        *,
        driver: CudaDriver | None = None,
        batch_bytes: int = BATCH_BYTES,
        direct_bytes: int = DIRECT_BYTES,
    ) -> None:
        self._driver = CudaDriver() if driver is None else driver
        self._pinned = PinnedRanges(self._driver)
        settings = _Settings(device, self._driver, self._pinned, batch_bytes, direct_bytes)
        self._out, self._in = _Lane(settings, outward=True), _Lane(settings, outward=False)

    def read(self, objects: Sequence[Chunks]) -> None:
        self._out.run(objects)

    def write(self, objects: Sequence[Chunks]) -> None:
        self._in.run(objects)

    def pin(self, memory: memoryview) -> int:
        return self._pinned.add(memory)

    def close(self) -> None:
        self._out.close()
        self._in.close()
        self._pinned.clear()


@dataclass(frozen=True, slots=True)
class _Settings:
    """What both directions share."""

    device: torch.device
    driver: CudaDriver
    pinned: PinnedRanges
    batch_bytes: int
    direct_bytes: int


@dataclass(frozen=True, slots=True)
class _Batch:
    """`hosts[i]` is where the device finds object i's payload: in its own place or, where that is not pinned, in a
    buffer. `buffered` are the places of the latter."""

    objects: Chunks
    hosts: Addresses
    buffered: list[int]


class _Buffers:
    """Room for one batch, made when it is first needed, and the event behind which it is free again."""

    def __init__(self, device: torch.device, batch_bytes: int) -> None:
        self._device, self._batch_bytes = device, batch_bytes
        self._host, self._packed = torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
        self._table, self._host_table = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        # Waiting lets go of the processor: a spinning thread for each direction would be taken from somebody.
        self.done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def host(self, size_bytes: int) -> int:
        """Return the address of pinned memory."""
        if len(self._host) < size_bytes:
            self._host = torch.empty(max(size_bytes, self._batch_bytes), dtype=torch.uint8, pin_memory=True)
        return self._host.data_ptr()

    def packed(self, size_bytes: int) -> Tensor:
        """Return memory of the device."""
        if len(self._packed) < size_bytes:
            self._packed = torch.empty(max(size_bytes, self._batch_bytes), dtype=torch.uint8, device=self._device)
        return self._packed[:size_bytes]

    def table(self, entries: int) -> tuple[Tensor, Tensor]:
        """Return room for so many int64 on the device, and the pinned memory from which they come."""
        if len(self._table) < entries:
            self._table = torch.empty(entries, dtype=torch.int64, device=self._device)
            self._host_table = torch.empty(entries, dtype=torch.int64, pin_memory=True)
        return self._table[:entries], self._host_table[:entries]


class _Lane:
    """One direction, with streams and buffers of its own: one stream copies, one packs or unpacks."""

    def __init__(self, settings: _Settings, *, outward: bool) -> None:
        self._settings, self._outward = settings, outward
        self._driver, self._device = settings.driver, settings.device
        self._copying, self._packing = (torch.cuda.Stream(self._device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._buffers = self._new_buffers()
        # A request waits for what is loaded, and spinning is faster; for what is saved nobody does.
        self._copied = torch.cuda.Event(blocking=outward)  # type: ignore[no-untyped-call]

    def run(self, objects: Sequence[Chunks]) -> None:
        """Copy all. Batches that need no buffer follow each other without a pause. Of others two are under way: the
        host's part of one runs beside the device's part of the next one."""
        begun: tuple[_Batch, _Buffers] | None = None
        in_place: list[Chunks] = []
        with torch.cuda.device(self._device):
            try:
                most = self._settings.batch_bytes
                cut = chain.from_iterable(some.batches(most, FIRST_BATCH_BYTES) for some in objects)
                for number, some in enumerate(cut):
                    if self._goes_in_place(some):
                        self._copy_chunks(some, some.payloads)
                        in_place.append(some)
                        continue
                    buffers = self._buffers[number % 2]
                    batch = self._batch(some, buffers)
                    self._begin(batch, buffers)
                    if begun is not None:
                        self._end(*begun)
                    begun = batch, buffers
                if begun is not None:
                    self._end(*begun)
                if in_place:
                    self._end_in_place(in_place)
            except BaseException:
                self._settle()
                raise

    def close(self) -> None:
        self._settle()
        self._buffers = self._new_buffers()

    def _new_buffers(self) -> tuple[_Buffers, _Buffers]:
        size = self._settings.batch_bytes
        return _Buffers(self._device, size), _Buffers(self._device, size)

    def _settle(self) -> None:
        """Wait until nothing is under way: the caller takes its memory back."""
        self._copying.synchronize()
        self._packing.synchronize()

    def _goes_in_place(self, objects: Chunks) -> bool:
        return self._is_direct(objects) and bool(self._settings.pinned.contain(objects.payloads, objects.sizes).all())

    def _is_direct(self, objects: Chunks) -> bool:
        return objects.chunk_bytes >= self._settings.direct_bytes or objects.chunk_bytes % GRAIN_BYTES != 0

    def _batch(self, objects: Chunks, buffers: _Buffers) -> _Batch:
        hosts, sizes = objects.payloads, objects.sizes
        buffered = np.flatnonzero(~self._settings.pinned.contain(hosts, sizes))
        if len(buffered):
            hosts, ends = hosts.copy(), np.cumsum(sizes[buffered])
            hosts[buffered] = buffers.host(int(ends[-1])) + ends - sizes[buffered]
        return _Batch(objects, hosts, buffered.tolist())

    def _begin(self, batch: _Batch, buffers: _Buffers) -> None:
        if not self._outward:
            for index in batch.buffered:
                _move(batch.hosts, batch.objects.payloads, batch.objects.sizes, index)
        if self._is_direct(batch.objects):
            self._copy_chunks(batch.objects, batch.hosts)
            buffers.done.record(self._copying)
        elif self._outward:
            self._pack_and_copy(batch, buffers)
        else:
            self._copy_and_unpack(batch, buffers)

    def _end(self, batch: _Batch, buffers: _Buffers) -> None:
        buffers.done.synchronize()
        if not self._outward:
            return
        for index in batch.buffered:
            _move(batch.objects.payloads, batch.hosts, batch.objects.sizes, index)
        _zero_missing(batch.objects)

    def _end_in_place(self, batches: Sequence[Chunks]) -> None:
        self._copied.record(self._copying)
        self._copied.synchronize()
        if self._outward:
            for objects in batches:
                _zero_missing(objects)

    def _copy_chunks(self, objects: Chunks, hosts: Addresses) -> None:
        blocks, places = objects.addresses, objects.places(hosts)
        if not blocks.all():
            blocks, places = blocks[blocks != 0], places[blocks != 0]
        targets, sources = (places, blocks) if self._outward else (blocks, places)
        self._driver.start_copies(targets, sources, np.full(len(blocks), objects.chunk_bytes, np.int64), self._copying)

    def _pack_and_copy(self, batch: _Batch, buffers: _Buffers) -> None:
        table, packed = self._send_table(batch, buffers)
        with torch.cuda.stream(self._packing):
            pack_chunks(packed, table, batch.objects.chunk_bytes)
        buffers.ready.record(self._packing)
        self._copying.wait_event(buffers.ready)
        hosts, places, sizes = self._whole_objects(batch, packed)
        self._driver.start_copies(hosts, places, sizes, self._copying)
        buffers.done.record(self._copying)

    def _copy_and_unpack(self, batch: _Batch, buffers: _Buffers) -> None:
        table, packed = self._send_table(batch, buffers)
        hosts, places, sizes = self._whole_objects(batch, packed)
        self._driver.start_copies(places, hosts, sizes, self._copying)
        buffers.ready.record(self._copying)
        self._packing.wait_event(buffers.ready)
        with torch.cuda.stream(self._packing):
            unpack_chunks(packed, table, batch.objects.chunk_bytes)
        buffers.done.record(self._packing)

    def _send_table(self, batch: _Batch, buffers: _Buffers) -> tuple[Tensor, Tensor]:
        """Return the chunks' addresses on the device, and room to pack the batch."""
        addresses = batch.objects.addresses
        table, host_table = buffers.table(len(addresses))
        host_table.numpy()[:] = addresses
        with torch.cuda.stream(self._packing):
            table.copy_(host_table, non_blocking=True)
        return table, buffers.packed(batch.objects.size_bytes)

    def _whole_objects(self, batch: _Batch, packed: Tensor) -> tuple[Addresses, Addresses, Addresses]:
        """Return where each object lies on the host and in `packed`, and its size."""
        sizes = batch.objects.sizes
        return batch.hosts, packed.data_ptr() + np.cumsum(sizes) - sizes, sizes


def _move(targets: Addresses, sources: Addresses, sizes: Addresses, index: int) -> None:
    ctypes.memmove(int(targets[index]), int(sources[index]), int(sizes[index]))


def _zero_missing(objects: Chunks) -> None:
    """Chunks that the device does not have read as zeros."""
    if objects.addresses.all():
        return
    places = objects.places(objects.payloads)
    for place in places[objects.addresses == 0].tolist():
        ctypes.memset(place, 0, objects.chunk_bytes)
