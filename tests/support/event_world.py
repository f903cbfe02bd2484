"""A cache of nothing but keys that tells what it does, for publishers and readers of events."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from kvstore.events.digest import Digest
from kvstore.events.held import HeldKeys
from kvstore.events.media import MEDIUM_OF, Tier
from kvstore.events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvstore.keys import block_key

BLOCK_SIZE = 4
TIERS: tuple[Tier, ...] = ("device", "ram")


def stored(keys: Sequence[bytes], tier: Tier = "device") -> BlockStored:
    return BlockStored(
        block_hashes=list(keys),
        parent_block_hash=None,
        token_ids=[7] * (BLOCK_SIZE * len(keys)),
        block_size=BLOCK_SIZE,
        medium=MEDIUM_OF[tier],
    )


def removed(keys: Sequence[bytes], tier: Tier = "device") -> BlockRemoved:
    return BlockRemoved(block_hashes=list(keys), medium=MEDIUM_OF[tier])


def numbered_key(number: int) -> bytes:
    return block_key(bytes(32), [number])


class CacheOfKeys:
    """`step` changes something at random and returns the events of it; `held` is the truth."""

    def __init__(self, rng: random.Random, most: int = 200) -> None:
        self.held: dict[Tier, dict[bytes, None]] = {tier: {} for tier in TIERS}
        self._rng, self._most = rng, most
        self.made = 0

    def content(self) -> dict[Tier, list[bytes]]:
        return {tier: list(keys) for tier, keys in self.held.items()}

    def step(self) -> list[Event]:
        if self._rng.random() < 0.002:
            self.held = {tier: {} for tier in TIERS}
            return [AllBlocksCleared()]
        tier = self._rng.choice(TIERS)
        held = self.held[tier]
        fresh = [numbered_key(self.made + n) for n in range(self._rng.randint(1, 5))]
        self.made += len(fresh)
        held.update(dict.fromkeys(fresh))
        events: list[Event] = [stored(fresh, tier)]
        gone = self._rng.sample(list(held), max(0, len(held) - self._most))
        for key in gone:
            del held[key]
        if gone:
            events.append(removed(gone, tier))
        return events


class KeysView:
    """A view that keeps the keys themselves."""

    def __init__(self) -> None:
        self.keys = HeldKeys()

    def apply(self, events: Sequence[Event]) -> None:
        self.keys.apply(events)

    def clear(self) -> None:
        self.keys.replace({})

    def digest(self) -> Mapping[Tier, Digest]:
        return {tier: Digest.of(keys) for tier, keys in self.keys.by_tier.items()}

    def shows(self, cache: CacheOfKeys) -> bool:
        ours = {tier: keys for tier, keys in self.keys.by_tier.items() if keys}
        return ours == {tier: set(keys) for tier, keys in cache.held.items() if keys}
