"""What is told of the store's tiers: whole blocks of this engine's namespace, each change once, and again after the
device was cleared."""

from __future__ import annotations

import msgspec

from engine.kv.blocks import BlockEvent
from engine.kv.event_log import KVEventLog
from engine.kv.tier_blocks import TierBlocks
from kvstore.events.held import HeldKeys
from kvstore.manager.parts import BlockParts
from kvstore.object_key import ObjectKey
from kvstore.tier import TierEvent
from tests.support.kv_objects import NAMESPACE

OWNER = bytes(16)
ONE, TWO, THREE = (bytes([number]) * 32 for number in (1, 2, 3))


def parts_of(epoch: str = "") -> BlockParts:
    """Of blocks that are cut into several objects."""
    parts = BlockParts(msgspec.structs.replace(NAMESPACE, weights_epoch=epoch), target_bytes=1)
    assert len(parts.full) > 1
    return parts


def keys_of(parts: BlockParts, block: bytes) -> list[ObjectKey]:
    return parts.keys(OWNER, [block], parts.full)


def hear(blocks: TierBlocks, parts: BlockParts, block: bytes, kind: str = "stored", tier: str = "ram") -> None:
    for key in keys_of(parts, block):
        blocks.hear(tier, TierEvent(kind, key))  # type: ignore[arg-type]


def test_a_block_is_told_when_its_last_object_comes_and_its_first_one_goes() -> None:
    parts = parts_of()
    blocks = TierBlocks(parts)
    blocks.enable()
    *first, last = keys_of(parts, ONE)
    for key in first:
        blocks.hear("disk", TierEvent("stored", key))
        blocks.hear("disk", TierEvent("stored", key))  # a server says so for what it has already
    assert blocks.take() == {}
    blocks.hear("disk", TierEvent("stored", last))
    assert blocks.take() == {"disk": {ONE: True}}
    blocks.hear("disk", TierEvent("removed", first[0]))
    blocks.hear("disk", TierEvent("removed", first[0]))
    assert blocks.take() == {"disk": {ONE: False}}
    blocks.hear("disk", TierEvent("stored", first[0]))
    blocks.hear("disk", TierEvent("cleared"))
    assert blocks.take() == {"disk": {ONE: False}}


def test_what_was_there_before_is_told_and_what_other_weights_computed_is_not() -> None:
    parts, later = parts_of(), parts_of("two")
    blocks = TierBlocks(parts)
    hear(blocks, parts, ONE)
    hear(blocks, later, TWO)
    assert blocks.take() == {}
    blocks.enable()
    assert blocks.take() == {"ram": {ONE: True}}
    blocks.use_namespace(later)
    assert blocks.take() == {"ram": {ONE: False}}
    hear(blocks, parts, ONE)
    hear(blocks, later, TWO)
    assert blocks.take() == {"ram": {TWO: True}}


def test_a_tenant_that_is_dropped_has_nothing_in_a_tier_that_does_not_tell() -> None:
    parts, other = parts_of(), b"o" * 16
    blocks = TierBlocks(parts)
    blocks.enable()
    for tier in ("ram", "remote"):
        hear(blocks, parts, ONE, tier=tier)
        for key in parts.keys(other, [TWO], parts.full):
            blocks.hear(tier, TierEvent("stored", key))  # type: ignore[arg-type]
    blocks.take()
    blocks.drop(other, "remote")
    assert blocks.take() == {"remote": {TWO: False}}
    blocks.drop(OWNER)
    assert blocks.take() == {"ram": {ONE: False}, "remote": {ONE: False}}


def test_no_more_is_remembered_than_is_allowed() -> None:
    parts = parts_of()
    blocks = TierBlocks(parts, max_blocks=2)
    blocks.enable()
    for block in (ONE, TWO, THREE):
        hear(blocks, parts, block)
    assert blocks.take() == {"ram": {ONE: False, TWO: True, THREE: True}}


def test_events_add_up_to_what_is_held_also_after_the_device_was_cleared() -> None:
    parts = parts_of()
    blocks, log, held = TierBlocks(parts), KVEventLog([None], 16), HeldKeys()
    log.follow(blocks)
    hear(blocks, parts, ONE)
    log.enabled = True

    def follow() -> dict[str, set[bytes]]:
        held.apply(log.take())
        shown = {str(tier): set(keys) for tier, keys in held.by_tier.items() if keys}
        assert shown == {tier: set(keys) for tier, keys in log.content().items() if keys}
        return shown

    log.on_block(0, BlockEvent("stored", TWO))
    log.stored(bytes(32), [TWO], 0, range(16))
    assert follow() == {"ram": {ONE}, "device": {TWO}}
    hear(blocks, parts, TWO, tier="disk")
    hear(blocks, parts, ONE, "removed")
    hear(blocks, parts, THREE)
    assert follow() == {"ram": {THREE}, "disk": {TWO}, "device": {TWO}}
    log.on_block(0, BlockEvent("cleared", b""))
    assert follow() == {"ram": {THREE}, "disk": {TWO}}
