"""Events of engines that are not ours, told again in our keys: their hashes are opaque, but their token ids are not.

What depends on more than tokens and scope (adapters, images, a salt that is not ours) is left out, as are blocks whose
parents are unknown: claims are missing then, but none is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.events.media import Tier, tier_of
from kvstore.events.messages import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from kvstore.keys import PUBLIC_SCOPE, block_key


class ForeignChain:
    """The keys of one engine's blocks, as long as any tier has them. `skipped` counts blocks that were left out."""

    def __init__(self, scope: bytes = PUBLIC_SCOPE) -> None:
        self.skipped = 0
        self._scope = scope
        self._keys: dict[BlockHash, bytes] = {}
        self._tiers: dict[BlockHash, set[Tier]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def translate(self, events: Sequence[Event]) -> list[Event]:
        """Return the events under block keys of ours, without what cannot be told."""
        return [told for event in events if (told := self._translate(event)) is not None]

    def clear(self) -> None:
        self._keys.clear()
        self._tiers.clear()

    def _translate(self, event: Event) -> Event | None:
        if isinstance(event, AllBlocksCleared):
            self.clear()
            return event
        tier = tier_of(event.medium)
        if tier is None or event.group_idx:
            # Of several KV groups the first one speaks for all; the closed loop sees where that is too much.
            return None
        keys = self._store(event, tier) if isinstance(event, BlockStored) else self._remove(event, tier)
        if not keys:
            return None
        if isinstance(event, BlockRemoved):
            return BlockRemoved(block_hashes=keys, medium=event.medium)
        return BlockStored(
            block_hashes=keys, parent_block_hash=None, token_ids=[], block_size=event.block_size, medium=event.medium
        )

    def _store(self, event: BlockStored, tier: Tier) -> list[BlockHash]:
        parent = self._scope if event.parent_block_hash is None else self._keys.get(event.parent_block_hash)
        size, hashes = event.block_size, event.block_hashes
        salted = event.lora_name or event.lora_id is not None or any(event.extra_keys or ())
        if parent is None or salted or size <= 0 or len(event.token_ids) != size * len(hashes):
            self.skipped += len(hashes)
            return []
        keys: list[BlockHash] = []
        for index, block_hash in enumerate(hashes):
            parent = block_key(parent, event.token_ids[index * size : (index + 1) * size])
            self._keys[block_hash] = parent
            self._tiers.setdefault(block_hash, set()).add(tier)
            keys.append(parent)
        return keys

    def _remove(self, event: BlockRemoved, tier: Tier) -> list[BlockHash]:
        keys: list[BlockHash] = []
        for block_hash in event.block_hashes:
            tiers = self._tiers.get(block_hash, set())
            if tier not in tiers:
                continue
            tiers.remove(tier)
            keys.append(self._keys[block_hash])
            if not tiers:
                del self._keys[block_hash], self._tiers[block_hash]
        return keys
