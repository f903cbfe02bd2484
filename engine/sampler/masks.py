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
    """Holds on the device what each byte of a mask adds to its eight logits. The numbers that come with a step are on
    it already."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._added = torch.from_numpy(np.where(allowed, 0.0, -np.inf).astype(np.float32)).to(device)

    def apply(self, logits: Tensor, rows: Tensor, words: Tensor) -> None:
        """Make -inf, in place, what the masks of `rows` (int64, ascending) do not allow; `words` are RowMasks'.

        Added rather than filled in: on a CPU that is several times as fast, whatever the mask.
        """
        eights = self._added.index_select(0, words.view(torch.uint8).flatten().to(torch.int32))
        added = eights.view(len(words), -1)[:, : self._vocab_size]
        if len(rows) == len(logits):
            logits.add_(added)
        else:
            logits[rows] += added
