"""Dequantisation of every supported GGUF type equals the `gguf` package's, bit for bit, on random bytes."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from engine.loader.gguf import FORMATS
from engine.loader.gguf_blocks import decode
from tests.support.k_quants import quantise

QUANTISED = {kind: layout for kind, layout in FORMATS.items() if layout.values > 1}
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)}
HALVES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where each block holds float16 numbers: random bytes there would often be infinite or no number."""


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: QUANTISED[kind].name)
def test_random_blocks_decode_to_the_reference_s_values(kind: int) -> None:
    layout = QUANTISED[kind]
    assert GGMLQuantizationType(kind).name == layout.name
    rng = np.random.default_rng(kind)
    blocks = rng.integers(0, 256, (300, layout.size_bytes), np.uint8)
    for start in HALVES[layout.name]:
        halves = rng.normal(size=(300, 1)).astype(np.float16)
        blocks[:, start : start + 2] = halves.view(np.uint8)
    expected = dequantize(blocks, GGMLQuantizationType(kind))
    values = decode(blocks.tobytes(), layout, (100, 3 * layout.values))
    assert values.dtype == np.float32
    assert np.array_equal(values, expected.reshape(values.shape))
    assert len(np.unique(values)) > 1000


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_quantised_values_come_back_within_a_step(name: str) -> None:
    kind = GGMLQuantizationType[name]
    values = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    decoded = decode(quantise(values, kind).tobytes(), FORMATS[kind.value], values.shape)
    steps = {"Q4_0": 16, "Q4_1": 15, "Q5_0": 32, "Q5_1": 31, "Q8_0": 255, "Q4_K": 15, "Q5_K": 31, "Q6_K": 62}
    assert np.abs(decoded - values).max() < 2 * np.abs(values).max() / steps[name]
