"""The draw from a whole row, for requests with neither top_k nor top_p: argmax of logits / T + Gumbel noise.

Nothing is ranked and no probability is computed. It knows no slots and no requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampler.noise import VocabNoise
from engine.sampler.order import first_argmax
from engine.sampler.rows import RowParams

_CPU_CHUNK_ELEMENTS = 2**19
_DEVICE_CHUNK_ELEMENTS = 2**25


class PlainChoice:
    """Owns the buffers. Rows go through in chunks that stay in the CPU's cache over some thirty passes."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        limit = _CPU_CHUNK_ELEMENTS if device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
        self._noise = VocabNoise(vocab_size, max(1, limit // vocab_size), device)
        self._scores = torch.empty((self._noise.max_rows, vocab_size), dtype=torch.float32, device=device)

    def choose(self, logits: Tensor, params: RowParams) -> Tensor:
        """Return one token id of each row of [rows, vocab]: int64 [rows]."""
        token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for start in range(0, len(logits), self._noise.max_rows):
            chunk = slice(start, start + self._noise.max_rows)
            token_ids[chunk] = self._choose_chunk(logits[chunk], params.take(chunk))
        return token_ids

    def _choose_chunk(self, logits: Tensor, params: RowParams) -> Tensor:
        scores = self._scores[: len(logits)].copy_(logits).div_(params.temperature[:, None])
        if params.uses_min_p:
            scores.masked_fill_(params.relative(logits) < params.log_min_p[:, None], -torch.inf)
        return first_argmax(scores.add_(self._noise.gumbel(params.keys)))[1]
