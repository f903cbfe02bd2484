"""What travels: events in the format that vLLM and SGLang publish (msgpack), and the talk at the replay socket.

    PUB     topic | sequence number, 8 bytes big-endian | EventBatch
    ROUTER  "" | 8 bytes: first number wanted  ->  "" | topic | number | EventBatch, for each that is still there
            "" | "dump"                        ->  "" | topic | number | DumpPart, for each part
            "" | "digest"                      ->  "" | topic | number | EventBatch without events
            and each answer ends with              "" | topic | END_NUMBER | ""

A block hash of ours is the whole 32-byte block key. Fields that others do not know stand last and have defaults.
"""

from __future__ import annotations

import msgspec

from kvstore.events.digest import Digest

DUMP = b"dump"
DIGEST = b"digest"
END_NUMBER = (-1).to_bytes(8, "big", signed=True)
MAX_FRAME_BYTES = 64 * 1024 * 1024
DUMP_PART_KEYS = 16_384

BlockHash = bytes | int


class BlockStored(msgspec.Struct, kw_only=True, tag=True):
    """Blocks that follow on each other became available in a tier (`medium`).

    `parent_block_hash` is the block before the first of them; None at the start of a sequence, where `scope` (32 bytes)
    is the root of the chain. `token_ids` are those of all the blocks, `block_size` for each.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[object] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    scope: bytes | None = None


class BlockRemoved(msgspec.Struct, kw_only=True, tag=True):
    """Blocks are no longer available in a tier."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, kw_only=True, tag=True):
    """Nothing is available any more, in any tier."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """The events of one step, in their order. `ts` is the publisher's wall clock in seconds.

    `epoch` names one life of the publisher's view: another one means that all that was known before is void. It is 0
    for publishers that have none. `digests` by medium come with a heartbeat: they are of the state behind this batch.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None
    epoch: int = 0
    digests: dict[str, Digest] | None = None


class DumpPart(msgspec.Struct, array_like=True):
    """Part of all that is held, as of the batch whose number the frame before it tells. `keys` are 32 bytes each,
    joined. `part` counts from 0 to `parts` - 1."""

    epoch: int
    part: int
    parts: int
    medium: str
    keys: bytes
