"""The runner's memory of requests: a row of tables per slot. Knows block ids and sampling parameters, no requests."""

from __future__ import annotations

import numpy as np
import torch

from engine.plan import NewSlot, Row


class SlotTables:
    """Persistent over steps, so that a plan carries only what changed.

    `block_tables[group]` int32 [slots, blocks]; entries past a slot's length are the null block. `last_tokens` int64
    [slots + 1] stays on the device: a decode row needs no answer from the host. The last is for padded rows.
    """

    def __init__(self, max_slots: int, max_blocks: int, block_size: int, groups: int, device: torch.device) -> None:
        self.block_tables = [np.zeros((max_slots, max_blocks), np.int32) for _ in range(groups)]
        self.last_tokens = torch.zeros(max_slots + 1, dtype=torch.int64, device=device)
        self._block_size = block_size
        self._lengths = np.zeros((max_slots, groups), np.int64)
        self._requests: list[NewSlot | None] = [None] * max_slots

    def free(self, slot: int) -> None:
        self._requests[slot] = None
        self._lengths[slot] = 0
        for table in self.block_tables:
            table[slot] = 0

    def take(self, new_slot: NewSlot) -> None:
        self.free(new_slot.slot)
        self._requests[new_slot.slot] = new_slot

    def append_blocks(self, row: Row) -> list[tuple[int, list[int]]]:
        """Append the row's new blocks; return (group, those of its blocks that this request will write)."""
        # A block that begins below these positions holds KV that is computed already, published or loaded.
        first_written = max(row.start, row.write_start)
        fresh = []
        for group, blocks in enumerate(row.new_blocks):
            have = int(self._lengths[row.slot, group])
            end = have + len(blocks)
            self.block_tables[group][row.slot, have:end] = blocks
            self._lengths[row.slot, group] = end
            starts = range(have * self._block_size, end * self._block_size, self._block_size)
            written = [block for block, start in zip(blocks, starts, strict=True) if start >= first_written]
            if written:
                fresh.append((group, written))
        return fresh

    def wanted_prompt_logprobs(self, row: Row) -> int | None:
        """Return how many alternatives the row's prompt tokens want, or None."""
        request = self._requests[row.slot]
        if request is None or row.token_ids is None or row.start + 1 >= request.prompt_len:
            return None
        return request.prompt_logprobs
