"""An engine's KV cache as the store reads and fills it (`kvstore.manager.contract.DeviceMemory`).

Blocks are copied as they are, whatever their type. Who may read or fill which block, and when, is the contract's; here
it only matters that the blocks of a call are nobody else's meanwhile, and that copying does not hold up the engine: its
thread neither waits here nor for the interpreter, which every copy lets go of.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

from engine.protocol import KVGroupSpec
from engine.runner.kv_cache import KVCache
from engine.runner.kv_places import Chunks, KVPlaces
from kvstore.manager.contract import Piece


class Copies(Protocol):
    """Copies between a device and the host's memory. Both calls return when all is done, or raise RuntimeError when
    nothing of it is under way any more."""

    def read(self, objects: Sequence[Chunks]) -> None: ...

    def write(self, objects: Sequence[Chunks]) -> None: ...

    def pin(self, memory: memoryview) -> int: ...

    def close(self) -> None: ...


class KVMemory:
    """`groups` are the ones that the cache was made for. Reading and writing may go on at the same time, one call each.

    A block that an object lacks (id 0) reads as zeros: the memory that it is read into may have held another's bytes.
    """

    def __init__(self, cache: KVCache, groups: Sequence[KVGroupSpec], copies: Copies | None = None) -> None:
        self._places = KVPlaces(cache, groups)
        self._copies = _copies(cache) if copies is None else copies

    def read(self, pieces: Sequence[Piece]) -> None:
        self._copies.read(self._places.chunks(pieces, writable=True))

    def write(self, pieces: Sequence[Piece]) -> None:
        self._copies.write(self._places.chunks(pieces, writable=False))

    def pin(self, memory: memoryview) -> int:
        """Let a device reach host memory in which payloads will lie, until `close`; return how many bytes of it, from
        the first on, it can. It is a matter of speed alone. To be called before the engine runs: drivers hold up all
        else meanwhile."""
        return self._copies.pin(memory)

    def close(self) -> None:
        """Give up what copies need. No call may be under way."""
        self._copies.close()


def _copies(cache: KVCache) -> Copies:
    device = cache.layers[0][0].device
    if device.type == "cpu":
        return HostCopies()
    from engine.runner.cuda_copies import CudaCopies

    return CudaCopies(device)


class HostCopies:
    """Between places in the host's memory, in the caller's thread. ctypes lets go of the interpreter for each copy."""

    def read(self, objects: Sequence[Chunks]) -> None:
        for some in objects:
            for source, target in zip(some.addresses.tolist(), some.places(some.payloads).tolist(), strict=True):
                if source:
                    ctypes.memmove(target, source, some.chunk_bytes)
                else:
                    ctypes.memset(target, 0, some.chunk_bytes)

    def write(self, objects: Sequence[Chunks]) -> None:
        for some in objects:
            for target, source in zip(some.addresses.tolist(), some.places(some.payloads).tolist(), strict=True):
                if target:
                    ctypes.memmove(target, source, some.chunk_bytes)

    def pin(self, memory: memoryview) -> int:
        return memory.nbytes

    def close(self) -> None:
        pass
