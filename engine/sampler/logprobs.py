"""Log-probabilities under the unmodified logits, as tensors and as the wire's values. It knows no slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.protocol import TokenLogprobs
from engine.sampler.order import largest, ranks_of

LOWEST_LOGPROB = -9999.0
"""Stands for -inf on the wire: JSON has no infinity."""

_CHUNK_ELEMENTS = 2**22


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """One entry per row: the chosen token's log-probability and rank [rows], the alternatives' ids and values
    [rows, count]."""

    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor

    def host(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """Return each row's values with its own number of alternatives."""
        values = (self.chosen, self.top_ids, self.top, self.ranks)
        rows = zip(*(tensor.tolist() for tensor in values), counts, strict=True)
        return [TokenLogprobs(chosen, ids[:count], top[:count], rank) for chosen, ids, top, rank, count in rows]


def logprobs_of(logits: Tensor, token_ids: Tensor, count: int) -> LogprobTensors:
    """Log-softmax in float32 of [rows, vocab] at `token_ids` [rows] and at the `count` largest of each row.

    Rows go in chunks, so that a long prompt does not need a float32 copy of all its logits.
    """
    step = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    chunks = [
        _chunk(logits[start : start + step], token_ids[start : start + step], count)
        for start in range(0, max(1, logits.shape[0]), step)
    ]
    if len(chunks) == 1:
        return chunks[0]
    return LogprobTensors(
        torch.cat([chunk.chosen for chunk in chunks]),
        torch.cat([chunk.ranks for chunk in chunks]),
        torch.cat([chunk.top_ids for chunk in chunks]),
        torch.cat([chunk.top for chunk in chunks]),
    )


def _chunk(logits: Tensor, token_ids: Tensor, count: int) -> LogprobTensors:
    top_ids = largest(logits, count).ids if count else token_ids.new_empty((len(token_ids), 0))
    logprobs = torch.log_softmax(logits, dim=1, dtype=torch.float32)
    chosen = logprobs.gather(1, token_ids[:, None]).squeeze(1)
    return LogprobTensors(_finite(chosen), ranks_of(logits, token_ids), top_ids, _finite(logprobs.gather(1, top_ids)))


def _finite(logprobs: Tensor) -> Tensor:
    return logprobs.nan_to_num(nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB).clamp(min=LOWEST_LOGPROB, max=0.0)
