"""The store as an engine sees it: one client for each engine, and the engine's memory as the store sees that.

The engine's loop calls the client from its own thread, and no call of it waits. What takes time happens in the store's
threads, which use the engine's memory through `DeviceMemory`. Ends are collected with `poll`; `wake` is called whenever
there is something to collect, so that an idle loop need not look.

Blocks are named by their keys (kvstore/keys.py) and counted from the start of their sequence. Which objects they are
cut into (kvstore/layout.py), which tier has them and whether fetching them pays is the store's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.layout import ObjectLayout
from kvstore.tier import TierName


@dataclass(frozen=True, slots=True)
class Piece:
    """One object between a device and memory: `payload` is laid out as `layout` says, and is of the blocks `block_ids`
    (of the object's group, one for each block that it spans). Block id 0 stands for none: nothing is written there.
    `address` is where the payload lies, 0 if the caller does not know: finding it out costs as much as all the rest."""

    layout: ObjectLayout
    block_ids: Sequence[int]
    payload: memoryview
    address: int = 0


class DeviceMemory(Protocol):
    """An engine's KV memory. Called from one of the store's threads at a time for each direction; both may wait, and
    raise what the device raises: the pieces then count as failed."""

    def read(self, pieces: Sequence[Piece]) -> None:
        """Copy blocks into the payloads; they are there when this returns. The blocks do not change meanwhile."""
        ...

    def write(self, pieces: Sequence[Piece]) -> None:
        """Copy payloads into blocks. On the return every later step of the engine sees them."""
        ...


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A full block to be saved. `index` is its place in the sequence, `block_ids` has one id per KV group (0 where the
    group has none). Blocks of one request come in order, from wherever the store's own part ended."""

    request_id: str
    scope: bytes
    index: int
    key: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What a load would fetch after the device's own prefix: the tier of each block in turn, none skipped. Empty when
    nothing is there or computing is predicted to be as fast."""

    tiers: tuple[TierName, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """End of a load: its first `blocks` are in the device's memory, and none behind them counts."""

    request_id: str
    blocks: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Released:
    """The blocks of a request that `finish` kept are read no longer."""

    request_id: str


class StoreClient(Protocol):
    """Nothing here waits or raises for what a tier does. A request id is one request's from `look_up` to `finish`."""

    def look_up(
        self, request_id: str, scope: bytes, keys: Sequence[bytes], start_block: int = 0, *, save: bool = True
    ) -> None:
        """Begin to find out how much of a prompt the tiers hold from `start_block` on, which is where the device's own
        prefix ends. `save` False is a request of which nothing is to be stored. Asking again begins anew."""
        ...

    def found(self, request_id: str, start_block: int, num_blocks: int) -> Found | None:
        """Return what would be loaded of blocks [start_block, num_blocks), or None while that is not known; it is known
        within the look-up's deadline. It is a hint: what has gone when it is loaded makes the load shorter."""
        ...

    def load(self, request_id: str, start_block: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Fill `block_ids[group][i]` with block start_block + i, of those that were looked up. Ends with one Loaded, in
        time for the load's deadline and with the contiguous part that came until then. Until then the blocks belong to
        the store."""
        ...

    def save(self, blocks: Sequence[StoredBlock]) -> None:
        """Store blocks; they may be read until `finish`, or until Released when that keeps them. Those of a sliding
        window (`window` groups) are read before this returns, or not stored."""
        ...

    def finish(self, request_id: str, keep_blocks: int) -> bool:
        """The request ends, or is preempted: blocks behind the first `keep_blocks` are not worth storing. True: some
        are still being read, keep them all until Released. False: they can be reused at once. Ends a look-up."""
        ...

    def poll(self) -> Sequence[Loaded | Released]: ...

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Tell how long the engine computed prompt tokens, which is what a load has to beat."""
        ...

    def close(self) -> None:
        """The engine goes away: on the return its memory is used no more."""
        ...
