"""What targets have of a short prompt: the same as `PrefixIndex` finds with arrays, block by block with plain numbers.

An array operation costs as much for one block as for a hundred, and a lookup is some fifty of them. Bits of all targets
are one number here, bit i for target i, however many words the planes have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.events.digest import fingerprint
from router.block_table import BlockTable
from router.index_planes import END, RUN, SPECULATIVE, TIERS
from router.target_bits import WORD_BITS, TargetBits
from router.values import Hit, Query

Bits = list[int]
"""By plane, the last of which is of what is only expected: the targets of one block."""

Counts = list[dict[int, int]]
"""By tier, and at last of what is only expected: how many blocks each set of targets has."""

NOTHING: Bits = [0] * (SPECULATIVE + 1)


def few_hits(
    table: BlockTable, bits: TargetBits, query: Query, age: int, sharing: Sequence[int] = ()
) -> dict[str, Hit]:
    """See `PrefixIndex.lookup`. Blocks that are known are marked as used at `age`. What one of the targets of a number
    in `sharing` has in its remote tier all of them have."""
    live = sum(int(word) << WORD_BITS * number for number, word in enumerate(bits.live))
    blocks = list(_known(table, query, live, age, sharing))
    on_device = _on_device(blocks, live, has_windows=table.planes[RUN] is not None)
    counts: Counts = [{} for _ in range(len(TIERS) + 1)]
    covered, before = live, live
    for number, (block, device) in enumerate(zip(blocks, on_device, strict=True)):
        _add(counts[0], before & ~device, number)
        before = device
        _add(counts[-1], device & ~(block[0] | block[RUN]), 1)
        covered &= device | block[1] | block[2] | block[3]
        left = covered & ~device
        for tier in range(1, len(TIERS)):
            _add(counts[tier], left & block[tier], 1)
            left &= ~block[tier]
    _add(counts[0], before, len(blocks))
    return _hits(counts, bits, query)


def _add(counts: dict[int, int], pattern: int, blocks: int) -> None:
    if pattern and blocks:
        counts[pattern] = counts.get(pattern, 0) + blocks


def _known(table: BlockTable, query: Query, live: int, age: int, sharing: Sequence[int]) -> Iterator[Bits]:
    """Yield the bits of each block of the prompt's beginning that a live target has somewhere, or is expected to."""
    planes = [index for index, plane in enumerate(table.planes) if plane is not None]
    views = [(index, word, table.view(index, word)) for index in planes for word in range(table.words)]
    reach = live
    for key in query.keys:
        slot = table.find_one(fingerprint(key))
        if slot < 0:
            return
        table.touch_one(slot, age)
        block = NOTHING.copy()
        for index, word, view in views:
            block[index] |= view[slot] << WORD_BITS * word
        for group in sharing:
            if block[3] & group:
                block[3] |= group
        reach &= block[0] | block[1] | block[2] | block[3] | block[RUN] | block[SPECULATIVE]
        if not reach:
            return
        yield block


def _on_device(blocks: list[Bits], live: int, *, has_windows: bool) -> list[int]:
    """Return for each block the targets that serve it from the device. Where there are windows what is served ends with
    an end."""
    run, runs, served = live, [], 0
    for block in blocks:
        run &= block[0] | block[RUN] | block[SPECULATIVE]
        runs.append(run)
    if not has_windows:
        return runs
    for number in range(len(blocks) - 1, -1, -1):
        block = blocks[number]
        served |= runs[number] & (block[0] | block[END] | block[SPECULATIVE])
        runs[number] = served
    return runs


def _hits(counts: Counts, bits: TargetBits, query: Query) -> dict[str, Hit]:
    by_bit: dict[int, list[int]] = {}
    for index, patterns in enumerate(counts):
        for pattern, blocks in patterns.items():
            for bit in _set_bits(pattern):
                if (tokens := by_bit.get(bit)) is None:
                    tokens = by_bit[bit] = [0] * len(counts)
                tokens[index] += blocks * query.block_size
    return {bits.names[bit]: _hit(tokens, query) for bit, tokens in by_bit.items()}


def _set_bits(pattern: int) -> Iterator[int]:
    while pattern:
        bit = pattern.bit_length() - 1
        pattern ^= 1 << bit
        yield bit


def _hit(tokens: list[int], query: Query) -> Hit:
    """The last token of a prompt is always computed: what is too much is taken from the slowest tier first."""
    over = sum(tokens[:-1]) - max(0, query.prompt_tokens - 1)
    for tier in range(len(TIERS) - 1, -1, -1):
        if over <= 0:
            break
        less = min(over, tokens[tier])
        tokens[tier] -= less
        over -= less
    device, ram, disk, remote, speculative = tokens
    return Hit(device=device, ram=ram, disk=disk, remote=remote, speculative=min(speculative, device))
