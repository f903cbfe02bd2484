"""What requests ask to be done to their logits before the choice. Knows slots, no requests.

In this order, in float32, element by element, so that a row's result is its own whatever runs beside it:

    allowed_token_ids    every other logit becomes -inf
    bad_words            the token that would complete one becomes -inf
    logit_bias           is added
    repetition_penalty   divides what is positive and multiplies what is negative, of tokens in the prompt or the output
    frequency_penalty    times the token's count in the output is subtracted
    presence_penalty     is subtracted once, if the output has the token

Log-probabilities stay those of the unmodified logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.plan import NewSlot
from engine.sampler.bad_words import BadWords
from engine.sampler.token_counts import TokenCounts


class LogitEdits:
    """The slots' edits. Rows of slots without any are not touched, and cost nothing."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._wanted = np.zeros(max_slots, dtype=np.bool_)
        self._limited = np.zeros(max_slots, dtype=np.bool_)
        self._prompt_len = np.zeros(max_slots, dtype=np.int64)
        self._allowed: list[Tensor | None] = [None] * max_slots
        self._bias: list[tuple[Tensor, Tensor] | None] = [None] * max_slots
        self._bad_words = BadWords(max_slots, device)
        self._counts = TokenCounts(max_slots, vocab_size, device)

    def set_slot(self, new_slot: NewSlot) -> bool:
        """Take over the request that now has the slot; return whether its logits are to be edited."""
        slot, sampling = new_slot.slot, new_slot.sampling
        self._prompt_len[slot] = new_slot.prompt_len
        allowed, bias = sampling.allowed_token_ids, sampling.logit_bias
        self._allowed[slot] = None if allowed is None else self._sent(allowed, torch.int64)
        self._bias[slot] = (
            (self._sent(list(bias), torch.int64), self._sent(list(bias.values()), torch.float32)) if bias else None
        )
        has_words, has_penalty = self._bad_words.set_slot(new_slot), self._counts.set_slot(new_slot)
        self._limited[slot] = allowed is not None or has_words
        self._wanted[slot] = bool(self._limited[slot]) or bool(bias) or has_penalty
        return bool(self._wanted[slot])

    def wanted(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell for each slot whether its logits are to be edited."""
        return self._wanted[slots]

    def limited(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell for each slot whether its edits can take tokens away. Bias and penalties are finite: they cannot."""
        return self._limited[slots]

    def apply(self, logits: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Edit float32 `logits` [rows, vocab] of the new tokens at `positions`, in place."""
        outputs = positions - self._prompt_len[slots]
        for row, (slot, output) in enumerate(zip(slots.tolist(), outputs.tolist(), strict=True)):
            allowed, bias = self._allowed[slot], self._bias[slot]
            if allowed is not None:
                kept = logits[row, allowed]
                logits[row].fill_(-torch.inf)
                logits[row, allowed] = kept
            self._bad_words.ban(logits[row], slot, output)
            if bias is not None:
                ids, values = bias
                logits[row, ids] += values  # ids are distinct
        self._counts.penalise(logits, slots)

    def note(self, slots: NDArray[np.int64], positions: NDArray[np.int64], token_ids: Tensor) -> None:
        """Take the tokens chosen for `positions`, which are on the device, into account from now on."""
        self._bad_words.remember(slots, positions - self._prompt_len[slots], token_ids)
        self._counts.count(slots, token_ids)

    def _sent(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device)
