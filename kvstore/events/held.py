"""The sets of keys that a stream of events adds up to, with their digests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvstore.events.digest import Digest
from kvstore.events.media import MEDIUM_OF, Tier, tier_of
from kvstore.events.messages import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event


class HeldKeys:
    """Keys by tier. Hashes that are no block keys of ours (integers) and unknown tiers are left out."""

    def __init__(self) -> None:
        self.by_tier: dict[Tier, set[bytes]] = {}
        self._digests: dict[Tier, Digest] = {}

    def __len__(self) -> int:
        return sum(len(keys) for keys in self.by_tier.values())

    @property
    def digests(self) -> dict[str, Digest]:
        """Digests by the name of the medium, empty tiers left out."""
        return {MEDIUM_OF[tier]: digest for tier, digest in self._digests.items() if digest.count}

    def apply(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self._store(tier_of(event.medium), event.block_hashes)
                case BlockRemoved():
                    self._remove(tier_of(event.medium), event.block_hashes)
                case AllBlocksCleared():
                    self.replace({})

    def replace(self, content: Mapping[Tier, Iterable[bytes]]) -> None:
        self.by_tier = {tier: set(keys) for tier, keys in content.items()}
        self._digests = {tier: Digest.of(keys) for tier, keys in self.by_tier.items()}

    def _store(self, tier: Tier | None, hashes: Sequence[BlockHash]) -> None:
        if tier is None:
            return
        held = self.by_tier.setdefault(tier, set())
        fresh = {key for key in hashes if isinstance(key, bytes)} - held
        held |= fresh
        self._digests[tier] = self._digests.get(tier, Digest()).plus(fresh)

    def _remove(self, tier: Tier | None, hashes: Sequence[BlockHash]) -> None:
        if tier is None or tier not in self.by_tier:
            return
        held = self.by_tier[tier]
        gone = {key for key in hashes if isinstance(key, bytes)} & held
        held -= gone
        self._digests[tier] = self._digests[tier].minus(gone)
