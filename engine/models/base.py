"""What the loader and the runner need of a model, whatever its architecture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from engine.attention.base import AttentionBatch
from engine.layers.fp8 import WeightPart
from engine.protocol import KVGroupSpec


class Model(Protocol):
    """A decoder that writes its KV through the attention back end it was built with."""

    def __call__(
        self,
        token_ids: Tensor,
        batches: Sequence[AttentionBatch],
        caches: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...

    def kv_groups(self) -> tuple[KVGroupSpec, ...]: ...

    def named_parts(self) -> Iterator[tuple[str, WeightPart]]: ...
