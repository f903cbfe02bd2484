"""Masks by what they allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine.sampler.masks import RowMasks


def row_masks(allowed: Mapping[int, Sequence[int]], vocab_size: int) -> RowMasks:
    """`allowed` has the token ids of some rows, in ascending order."""
    words = np.zeros((len(allowed), -(-vocab_size // 32)), np.uint32)
    for place, ids in enumerate(allowed.values()):
        for token_id in ids:
            words[place, token_id // 32] |= np.uint32(1) << np.uint32(token_id % 32)
    return RowMasks(tuple(allowed), words.view(np.int32))
