"""Which tokens a row may choose, as bits: what a grammar allows next. Knows rows and bits, no grammars."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowMasks:
    """`words` int32 [len(rows), ceil(vocab / 32)]: bit i of word w allows token 32 * w + i. `rows` ascend."""

    rows: tuple[int, ...]
    words: NDArray[np.int32]


class TokenMasks:
    """Holds the bits of a word on the device. The numbers that come with a step are on it already."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        bits = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)
        self._bits = torch.from_numpy(bits).to(device)

    def apply(self, logits: Tensor, rows: Tensor, words: Tensor) -> None:
        """Make -inf, in place, what the masks of `rows` (int64, ascending) do not allow; `words` are RowMasks'."""
        forbidden = (words.unsqueeze(-1) & self._bits).eq(0).flatten(1)[:, : self._vocab_size]
        if len(rows) == len(logits):
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)
