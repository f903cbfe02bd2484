"""Presence, frequency and repetition penalties, and the token counts that they need. Knows no requests.

The counts live on the device: the tokens of a step are counted there before the host knows them, so steps may overlap.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.plan import NewSlot

_CHUNK_ELEMENTS = 2**22


class TokenCounts:
    """An entry is twice the number of times that the slot's output has the token, plus one if its prompt has it.

    On a CPU the table exists from the first request with a penalty on, on a GPU, whose memory is given out when the
    engine starts, from the start.
    """

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self._max_slots, self._vocab_size, self._device = max_slots, vocab_size, device
        self._table = self._new_table() if device.type == "cuda" else None
        self._active = np.zeros(max_slots, dtype=np.bool_)
        self._presence = np.zeros(max_slots, dtype=np.float32)
        self._frequency = np.zeros(max_slots, dtype=np.float32)
        self._repetition = np.ones(max_slots, dtype=np.float32)

    def set_slot(self, new_slot: NewSlot) -> bool:
        """Take over the request that now has the slot; return whether it has a penalty."""
        slot, sampling = new_slot.slot, new_slot.sampling
        penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        self._presence[slot], self._frequency[slot], self._repetition[slot] = penalties
        self._active[slot] = active = penalties != (0.0, 0.0, 1.0)
        if active:
            if self._table is None:
                self._table = self._new_table()
            counts = 2 * np.bincount(np.asarray(new_slot.output_ids, dtype=np.int64), minlength=self._vocab_size)
            counts[np.asarray(new_slot.prompt_ids, dtype=np.int64)] += 1  # once each: the index is not accumulated
            self._table[slot] = torch.from_numpy(counts.astype(np.int32)).to(self._device)
        return bool(active)

    def _new_table(self) -> Tensor:
        return torch.zeros((self._max_slots, self._vocab_size), dtype=torch.int32, device=self._device)

    def penalise(self, logits: Tensor, slots: NDArray[np.int64]) -> None:
        """Change float32 `logits` [rows, vocab] in place, those of tokens that the slots have seen."""
        rows = np.flatnonzero(self._active[slots])
        if not len(rows) or self._table is None:
            return
        step = max(1, _CHUNK_ELEMENTS // self._vocab_size)
        for some in np.split(rows, range(step, len(rows), step)):
            of = slots[some]
            counts = self._table[self._sent(of)]
            whole = len(some) == len(logits)
            at = self._sent(some)
            penalised = self._penalised(logits if whole else logits[at], counts, of)
            if whole:
                logits.copy_(penalised)
            else:
                logits[at] = penalised

    def _penalised(self, logits: Tensor, counts: Tensor, slots: NDArray[np.int64]) -> Tensor:
        repetition = self._sent(self._repetition[slots])[:, None]
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        penalised = torch.where(counts > 0, scaled, logits)
        outputs = counts.bitwise_right_shift(1)
        penalised -= outputs * self._sent(self._frequency[slots])[:, None]
        penalised -= outputs.clamp_(max=1) * self._sent(self._presence[slots])[:, None]
        return penalised

    def count(self, slots: NDArray[np.int64], token_ids: Tensor) -> None:
        """Add the slots' new output tokens (on the device); each slot is there once."""
        rows = np.flatnonzero(self._active[slots])
        if len(rows) and self._table is not None:
            self._table[self._sent(slots[rows]), token_ids[self._sent(rows)]] += 2

    def _sent(self, values: NDArray[np.int64] | NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)
