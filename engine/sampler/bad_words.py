"""Token sequences that an output must not contain: the last token of one is banned where the output ends in the others.

Knows no requests. The last output tokens of a slot are kept on the device, so steps may overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.plan import NewSlot
from engine.validation import MAX_BAD_WORD_TOKENS


@dataclass(frozen=True, slots=True)
class _Words:
    """All of one slot: what comes before the last token [words, longest], its length and the last token [words]."""

    before: Tensor
    lengths: Tensor
    last: Tensor
    longest: int


class BadWords:
    """Output token i of a slot is in column i modulo the table's width."""

    def __init__(self, max_slots: int, device: torch.device) -> None:
        self._device = device
        self._words: list[_Words | None] = [None] * max_slots
        self._remembers = np.zeros(max_slots, dtype=np.bool_)
        self._recent = torch.zeros((max_slots, MAX_BAD_WORD_TOKENS), dtype=torch.int64, device=device)

    def set_slot(self, new_slot: NewSlot) -> bool:
        """Take over the request that now has the slot; return whether it has bad words."""
        slot, words = new_slot.slot, new_slot.sampling.bad_words
        longest = max((len(word) - 1 for word in words), default=0)
        self._remembers[slot] = longest > 0
        self._words[slot] = self._on_device(words, longest) if words else None
        if longest:
            first = max(0, len(new_slot.output_ids) - MAX_BAD_WORD_TOKENS)
            recent = np.zeros(MAX_BAD_WORD_TOKENS, dtype=np.int64)
            recent[np.arange(first, len(new_slot.output_ids)) % MAX_BAD_WORD_TOKENS] = new_slot.output_ids[first:]
            self._recent[slot] = torch.from_numpy(recent).to(self._device)
        return bool(words)

    def _on_device(self, words: tuple[tuple[int, ...], ...], longest: int) -> _Words:
        before = np.zeros((len(words), longest), dtype=np.int64)
        for index, word in enumerate(words):
            before[index, : len(word) - 1] = word[:-1]
        lengths = torch.tensor([len(word) - 1 for word in words], dtype=torch.int64)
        last = torch.tensor([word[-1] for word in words], dtype=torch.int64)
        device = self._device
        return _Words(torch.from_numpy(before).to(device), lengths.to(device), last.to(device), longest)

    def ban(self, logits: Tensor, slot: int, outputs: int) -> None:
        """Set what must not be output number `outputs` to -inf in one float32 row, in place."""
        words = self._words[slot]
        if words is None:
            return
        banned = words.lengths <= outputs
        if words.longest:
            index = torch.arange(words.longest, device=self._device)
            lengths = words.lengths[:, None]
            recent = self._recent[slot][(outputs - lengths + index) % MAX_BAD_WORD_TOKENS]
            banned = banned & ((recent == words.before) | (index >= lengths)).all(dim=1)
        # Added, not set: words may share their last token, and one ban is enough.
        logits.index_put_((words.last,), torch.where(banned, -torch.inf, 0.0), accumulate=True)

    def remember(self, slots: NDArray[np.int64], outputs: NDArray[np.int64], token_ids: Tensor) -> None:
        """Keep the slots' new tokens (on the device), whose output numbers are `outputs`; each slot is there once."""
        rows = np.flatnonzero(self._remembers[slots])
        if len(rows):
            where = (slots[rows], outputs[rows] % MAX_BAD_WORD_TOKENS, rows)
            slot_at, column, row = (torch.from_numpy(part).to(self._device, non_blocking=True) for part in where)
            self._recent[slot_at, column] = token_ids[row]
