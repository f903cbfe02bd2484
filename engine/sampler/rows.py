"""What the noisy choices need to know about their rows, as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowParams:
    """One entry per row of logits. Off is top_p 1, top_k 0, log_min_p -inf.

    temperature, log_min_p   float32 [rows]
    top_p                    float64 [rows]
    top_k                    int64 [rows]
    keys                     int32 [rows, 2]  of the noise
    largest                  float32 [rows]   the row's largest logit
    uses_min_p               whether any of the rows does; known on the host
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    log_min_p: Tensor
    keys: Tensor
    largest: Tensor
    uses_min_p: bool

    def take(self, rows: Tensor | slice) -> RowParams:
        """Return the parameters of some rows."""
        return RowParams(
            self.temperature[rows],
            self.top_p[rows],
            self.top_k[rows],
            self.log_min_p[rows],
            self.keys[rows],
            self.largest[rows],
            self.uses_min_p,
        )

    def relative(self, logits: Tensor) -> Tensor:
        """Return log(p / largest p) under the temperature, in float32, of [rows, n] logits."""
        return logits.to(torch.float32).sub(self.largest[:, None]).div_(self.temperature[:, None])
