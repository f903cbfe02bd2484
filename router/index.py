"""Which target holds which KV blocks: learned from events, asked for every request.

A block is known by the first 8 bytes of its key. Of ten million blocks two share them with a probability of 3e-6; a hit
that is claimed wrongly costs the target some computing and is seen when predictions are compared with what happened.

Knows keys, tiers and targets; not where events come from (router/feed.py) and not what a hit is worth (policies).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.events.digest import Digest, fingerprint
from kvstore.events.media import Tier
from kvstore.keys import KEY_BYTES
from router.block_table import EMPTY, BlockTable, Slots, Words
from router.few_hits import few_hits
from router.index_planes import PLANES, RUN, SPECULATIVE, TIERS
from router.speculation import Speculation
from router.target_bits import WORD_BITS, TargetBits, mask_of, plain_mask_of
from router.values import Hit, Query

FILL = 0.75
SPECULATION_TTL_S = 2.0
LOOKUP_KEYS = 255
"""Keys per look into the table: a prompt that nobody knows costs one look, however long it is."""

APPLY_KEYS = 65_536
FEW_KEYS = 32
"""Up to so many changes are cheaper one by one."""

Counts = NDArray[np.int64 | np.uint8]


class PrefixIndex:
    """Blocks by target and tier. `clock` is monotonic, in seconds.

    Takes 16 bytes for each of `max_blocks`, and 11 more for each tier in use (speculation is one) and 64 targets. With
    more blocks new ones more and more take the place of the least recently used, and there are never more than a third
    too many. A target's digest still tells what events said, not what is left of it.
    """

    def __init__(self, max_blocks: int, clock: Callable[[], float], *, few_keys: int = FEW_KEYS) -> None:
        self.max_blocks = max_blocks
        self.evicted = 0
        self._clock, self._few_keys = clock, few_keys
        self._started_s = clock()
        self._table = BlockTable(int(max_blocks / FILL), len(PLANES) + 1, self._on_evict)
        self._bits = TargetBits(self._table)
        self._speculation = Speculation()
        # By bit: what events said that a tier holds, and the tiers of which something was evicted.
        self._digests: dict[int, dict[Tier, Digest]] = {}
        self._lost: dict[Tier, Words] = {}
        self._places: dict[str, str] = {}
        self._groups: list[int] | None = None

    @property
    def targets(self) -> Collection[str]:
        return self._bits.names_in_use

    @property
    def num_blocks(self) -> int:
        """Different blocks that are known, retired ones that are still to be swept included."""
        return self._table.count

    @property
    def size_bytes(self) -> int:
        return self._table.size_bytes

    def add_target(self, target_id: str) -> None:
        """Begin to know a target, with nothing in it. One that is known keeps what it has."""
        if target_id not in self._bits:
            self._groups = None
            self._digests[self._bits.add(target_id)] = {}

    def share(self, target_id: str, place: str | None) -> None:
        """What one target has in its remote tier all have whose `place` is the same; None is a target's own."""
        if self._places.get(target_id) != place:
            self._groups = None
            if place is None:
                del self._places[target_id]
            else:
                self._places[target_id] = place

    def drop_target(self, target_id: str) -> None:
        """Forget a target, in O(1). Unknown ones are ignored."""
        self._groups = None
        bit = self._bits.retire(target_id)
        if bit is not None:
            del self._digests[bit]
            self._speculation.forget(bit)
            for lost in self._lost.values():
                lost[bit // WORD_BITS : bit // WORD_BITS + 1] &= ~mask_of(bit)

    def clear(self, target_id: str) -> None:
        """The target has nothing any more."""
        bit = self._bits.get(target_id)
        # One that never had anything keeps its bit: who tries in vain to reach it says this again and again.
        if bit is not None and (self._digests[bit] or self._speculation.knows(bit)):
            self.drop_target(target_id)
            self.add_target(target_id)

    def apply(
        self, target_id: str, stored: Sequence[bytes] = (), removed: Sequence[bytes] = (), tier: Tier = "device"
    ) -> None:
        """Note changes of one tier, `removed` before `stored`. Events of unknown targets are late: ignored."""
        bit = self._bits.get(target_id)
        if bit is None:
            return
        self._bits.sweep()
        self._end_speculation()
        if len(removed) > self._few_keys:
            self._remove(bit, tier, np.unique(_prints(removed)))
        elif removed:
            self._remove_few(bit, tier, removed)
        if len(stored) > self._few_keys:
            for start in range(0, len(stored), APPLY_KEYS):
                self._store(bit, tier, np.unique(_prints(stored[start : start + APPLY_KEYS])))
        elif stored:
            self._store_few(bit, tier, stored)

    def replace(self, target_id: str, content: Mapping[Tier, Sequence[bytes]]) -> None:
        """The target has exactly this."""
        self.clear(target_id)
        for tier, keys in content.items():
            self.apply(target_id, stored=keys, tier=tier)

    def speculate(self, target_id: str, keys: Iterable[bytes], ttl_s: float = SPECULATION_TTL_S) -> None:
        """A request with these keys was sent there: for `ttl_s` they count as on its device."""
        bit = self._bits.get(target_id)
        prints = [fingerprint(key) for key in keys]
        if bit is None or not prints or ttl_s <= 0:
            return
        self._speculation.add(bit, prints, self._clock() + ttl_s)
        self._end_speculation()
        if len(prints) > self._few_keys:
            slots = self._table.insert(np.unique(np.array(prints, np.uint64)), self._age())
            self._table.plane(SPECULATIVE)[bit // WORD_BITS, slots[slots >= 0]] |= mask_of(bit)
            return
        mask, view, age = plain_mask_of(bit), self._table.view(SPECULATIVE, bit // WORD_BITS), self._age()
        for one in prints:
            view[self._table.insert_one(one, age)] |= mask

    def lookup(self, query: Query) -> dict[str, Hit]:
        """Return what each target has of the prompt's beginning. Targets that have nothing are left out.

        The device serves what it has up to its first gap, or up to the last end before that where it has windows; from
        there on the other tiers do, up to theirs. The last token of a prompt is always computed.
        """
        self._end_speculation()
        if len(query.keys) <= self._few_keys:
            return few_hits(self._table, self._bits, query, self._age(), self._sharing())
        counts: Counts | None = None
        state = (self._bits.live, self._bits.live)
        # An end may be anywhere in a run: where there are such, the whole prompt is one look.
        step = LOOKUP_KEYS if self._table.planes[RUN] is None else max(1, len(query.keys))
        for start in range(0, len(query.keys), step):
            state, found = self._look(_prints(query.keys[start : start + step]), *state)
            counts = found if counts is None else counts + found
            if not state[1].any():
                break
        return {} if counts is None else self._hits(counts, query)

    def digest(self, target_id: str) -> dict[Tier, Digest]:
        """Return the digest of what events said that each tier holds, speculation aside. Empty tiers are left out."""
        bit = self._bits.get(target_id)
        digests = {} if bit is None else self._digests[bit]
        return {tier: digest for tier, digest in digests.items() if digest.count}

    # ---- changes

    def _store(self, bit: int, tier: Tier, prints: Words) -> None:
        slots = self._table.insert(prints, self._age())
        word, mask = bit // WORD_BITS, mask_of(bit)
        plane = self._table.plane(PLANES.index(tier))[word]
        placed = slots >= 0
        before = plane[slots[placed]]
        plane[slots[placed]] = before | mask
        if not placed.all():
            self.evicted += int((~placed).sum())
            self._note_lost(tier, word, mask)
        placed[placed] = before & mask != EMPTY
        self._count(bit, tier, prints[~placed], 1)

    def _remove(self, bit: int, tier: Tier, prints: Words) -> None:
        index, word, mask = PLANES.index(tier), bit // WORD_BITS, mask_of(bit)
        slots = self._table.find(prints)
        if self._table.planes[index] is None:
            return
        plane = self._table.plane(index)[word]
        known = slots >= 0
        known[known] = plane[slots[known]] & mask != EMPTY
        plane[slots[known]] &= ~mask
        self._table.release(slots[known])
        self._count(bit, tier, prints if self._has_lost(bit, tier) else prints[known], -1)

    def _store_few(self, bit: int, tier: Tier, keys: Sequence[bytes]) -> None:
        """`_store`, key by key."""
        mask, view = plain_mask_of(bit), self._table.view(PLANES.index(tier), bit // WORD_BITS)
        fresh, age = [], self._age()
        for key in keys:
            slot = self._table.insert_one(fingerprint(key), age)
            if not view[slot] & mask:
                view[slot] |= mask
                fresh.append(key)
        if fresh:
            self._digests[bit][tier] = self._digests[bit].get(tier, Digest()).plus(fresh)

    def _remove_few(self, bit: int, tier: Tier, keys: Sequence[bytes]) -> None:
        """`_remove`, key by key."""
        if self._table.planes[PLANES.index(tier)] is None:
            return
        mask, view = plain_mask_of(bit), self._table.view(PLANES.index(tier), bit // WORD_BITS)
        gone = []
        for key in dict.fromkeys(keys):
            slot = self._table.find_one(fingerprint(key))
            if slot >= 0 and view[slot] & mask:
                view[slot] &= ~mask
                self._table.release_one(slot)
                gone.append(key)
            elif self._has_lost(bit, tier):
                gone.append(key)
        if gone:
            self._digests[bit][tier] = self._digests[bit].get(tier, Digest()).minus(gone)

    def _has_lost(self, bit: int, tier: Tier) -> bool:
        """Whether something was evicted that the tier may still have: then it is no surprise when that is removed."""
        lost, word = self._lost.get(tier), bit // WORD_BITS
        return lost is not None and word < len(lost) and bool(lost[word] & mask_of(bit))

    def _count(self, bit: int, tier: Tier, prints: Words, sign: int) -> None:
        digest = self._digests[bit].get(tier, Digest())
        xor = digest.xor ^ int(np.bitwise_xor.reduce(prints))
        self._digests[bit][tier] = Digest(digest.count + sign * len(prints), xor)

    def _on_evict(self, slots: Slots) -> None:
        self.evicted += len(slots)
        for tier, plane in zip(PLANES, self._table.planes, strict=False):
            if plane is not None:
                for word, bits in enumerate(np.bitwise_or.reduce(plane[:, slots], axis=1) & self._bits.live):
                    self._note_lost(tier, word, bits)

    def _note_lost(self, tier: Tier, word: int, bits: np.uint64) -> None:
        lost = self._lost.get(tier, np.zeros(0, np.uint64))
        if len(lost) < len(self._bits.live):
            lost = np.concatenate((lost, np.zeros(len(self._bits.live) - len(lost), np.uint64)))
        lost[word] |= bits
        self._lost[tier] = lost

    def _end_speculation(self) -> None:
        if not self._speculation:
            return
        for bit, ended in self._speculation.pop_ended(self._clock()):
            if len(ended) <= self._few_keys:
                self._end_few(bit, ended)
                continue
            slots = self._table.find(np.array(ended, np.uint64))
            slots = np.unique(slots[slots >= 0])
            self._table.plane(SPECULATIVE)[bit // WORD_BITS, slots] &= ~mask_of(bit)
            self._table.release(slots)

    def _end_few(self, bit: int, ended: Sequence[int]) -> None:
        mask, view = plain_mask_of(bit), self._table.view(SPECULATIVE, bit // WORD_BITS)
        for one in ended:
            slot = self._table.find_one(one)
            if slot >= 0:
                view[slot] &= ~mask
                self._table.release_one(slot)

    def _age(self) -> int:
        return int(self._clock() - self._started_s)

    # ---- looking

    def _sharing(self) -> list[int]:
        """Return the bits of the targets that share a remote tier, as one number for each place of several."""
        if self._groups is None:
            masks: dict[str, int] = {}
            for target_id, place in self._places.items():
                if (bit := self._bits.get(target_id)) is not None:
                    masks[place] = masks.get(place, 0) | 1 << bit
            self._groups = [mask for mask in masks.values() if mask & (mask - 1)]
        return self._groups

    def _look(self, prints: Words, device: Words, any_tier: Words) -> tuple[tuple[Words, Words], Counts]:
        """Follow the chain of `prints`, which goes on for the targets in `device` on the device, and for those in
        `any_tier` somewhere. Return the same behind it, and leading blocks by kind and bit: the tiers', then those on
        the device that are only expected.
        """
        slots = self._table.find(prints)
        known = slots >= 0
        self._table.touch(slots[known], self._age())
        real, *held, run, end, expected = (self._bits_at(index, slots, known) for index in range(SPECULATIVE + 1))
        if held[-1] is not None:
            held[-1] = _shared(held[-1], self._sharing())
        if real is None:
            real = np.zeros((self._table.words, len(prints)), np.uint64)
        if run is None:
            on_device = _run(real if expected is None else real | expected, device)
        else:
            ends = _any_of(real, end, expected)
            real = real | run
            on_device = _up_to_last(_run(_any_of(real, expected), device) & ends)
        counts = np.zeros((len(TIERS) + 1, len(self._bits.names)), np.int64)
        counts[0] = _per_bit(on_device)
        if expected is not None:
            counts[len(TIERS)] = _per_bit(on_device & ~real)
        covered = on_device
        others = [bits for bits in held if bits is not None]
        if others:
            covered = _run(on_device | np.bitwise_or.reduce(others), any_tier)
        left = covered & ~on_device
        for tier, bits in enumerate(held, 1):
            if bits is not None:
                counts[tier] = _per_bit(left & bits)
                left &= ~bits
        return (on_device[:, -1], covered[:, -1]), counts

    def _bits_at(self, plane_index: int, slots: Slots, known: NDArray[np.bool_]) -> Words | None:
        """Return (words, blocks), zero where a block is unknown; None for a plane in which nothing ever stood."""
        plane = self._table.planes[plane_index]
        if plane is None:
            return None
        return np.where(known, plane.take(slots, axis=1), EMPTY)

    def _hits(self, counts: Counts, query: Query) -> dict[str, Hit]:
        names = self._bits.names
        bits = np.flatnonzero(counts[: len(TIERS)].any(axis=0))
        tokens = counts[:, bits] * query.block_size
        over = tokens[: len(TIERS)].sum(axis=0) - max(0, query.prompt_tokens - 1)
        if (over > 0).any():
            _shorten(tokens, over)
        targets = [names[bit] for bit in bits.tolist()]
        if not tokens[1:].any():
            return {target: Hit(device=device) for target, device in zip(targets, tokens[0].tolist(), strict=True)}
        return {
            target: Hit(device=device, ram=ram, disk=disk, remote=remote, speculative=speculative)
            for target, device, ram, disk, remote, speculative in zip(targets, *tokens.tolist(), strict=True)
        }


def _shared(bits: Words, groups: Sequence[int]) -> Words:
    """Return, for (words, blocks), the bits with those of the others of each group in which one is set."""
    for group in groups:
        mask = np.array([group >> WORD_BITS * word & (1 << WORD_BITS) - 1 for word in range(len(bits))], np.uint64)
        has = (bits & mask[:, None]).any(axis=0)
        bits = bits | np.where(has, mask[:, None], EMPTY)
    return bits


def _shorten(tokens: Counts, over: Counts) -> None:
    """Take so many tokens away from each column: from the slowest tier first, whose are the last of the prompt."""
    over = np.maximum(over, 0)
    for tier in range(len(TIERS) - 1, -1, -1):
        less = np.minimum(over, tokens[tier])
        tokens[tier] -= less
        over -= less
    tokens[-1] = np.minimum(tokens[-1], tokens[0])


def _prints(keys: Sequence[bytes]) -> Words:
    """Return the fingerprints of 32-byte keys, as `kvstore.events.digest.fingerprint` does."""
    if not keys:
        return np.zeros(0, np.uint64)
    prints = np.frombuffer(b"".join(keys), "<u8")[:: KEY_BYTES // 8].astype(np.uint64)
    prints[prints == EMPTY] = 1
    return prints


def _run(bits: Words, before: Words) -> Words:
    """Return, for (words, blocks), the bits that are set in all blocks from the first one on, and in `before`."""
    runs: Words = np.bitwise_and.accumulate(bits, axis=1)
    return runs & before[:, None]


def _any_of(bits: Words, *others: Words | None) -> Words:
    for one in others:
        bits = bits if one is None else bits | one
    return bits


def _up_to_last(bits: Words) -> Words:
    """Return, for (words, blocks), the bits that are set in the block or in a later one."""
    return np.bitwise_or.accumulate(bits[:, ::-1], axis=1)[:, ::-1]


def _per_bit(bits: Words) -> Counts:
    """Return how often each bit is set over all blocks."""
    octets = np.ascontiguousarray(bits, "<u8").view(np.uint8).reshape(*bits.shape, 8)
    # In bytes where they are enough, which is faster.
    dtype = np.uint8 if bits.shape[1] <= LOOKUP_KEYS else np.int64
    counts: Counts = np.unpackbits(octets, axis=-1, bitorder="little").sum(axis=1, dtype=dtype)
    return counts.reshape(-1)
