"""Quantises to any GGUF type that we read: K types here, which the `gguf` package only decodes, all others with it.

Plain rounding of evenly spaced steps: good enough for a file whose values are known, not for a model's quality.
"""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def quantise(values: Floats, kind: GGMLQuantizationType) -> NDArray[np.generic]:
    """Return rows of blocks for rows of values, whose length is a multiple of the type's block."""
    own = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}.get(kind.name)
    if own is None:
        return gguf.quants.quantize(values, kind)
    return own(values.reshape(-1, 256)).reshape(len(values), -1)


def _q4_k(blocks: Floats) -> Bytes:
    head, quants = _parts_with_minima(blocks, 15)
    return np.concatenate((head, _pair_nibbles(quants)), axis=1)


def _q5_k(blocks: Floats) -> Bytes:
    head, quants = _parts_with_minima(blocks, 31)
    fifth = (quants >> 4) << np.arange(8, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce(fifth, axis=1)
    return np.concatenate((head, high, _pair_nibbles(quants & 15)), axis=1)


def _q6_k(blocks: Floats) -> Bytes:
    parts = blocks.reshape(-1, 16, 16)
    wanted = np.abs(parts).max(axis=2) / 31
    d = (wanted.max(axis=1, keepdims=True) / 127).astype(np.float16)
    scales = np.maximum(1, np.rint(wanted / d)).astype(np.int8)
    steps = d.astype(np.float32) * scales
    quants = (np.clip(np.rint(parts / steps[:, :, None]), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = quants & 15
    packed_low = np.concatenate((low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4), axis=2)
    packed_high = np.bitwise_or.reduce((quants >> 4) << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2)
    rows = len(blocks)
    pieces = (packed_low.reshape(rows, -1), packed_high.reshape(rows, -1), scales.view(np.uint8), d.view(np.uint8))
    return np.concatenate(pieces, axis=1)


def _parts_with_minima(blocks: Floats, most: int) -> tuple[Bytes, Bytes]:
    """Return d, dmin and the 12 bytes of scales and minima, and the quants in 0 to `most`, [blocks, 8, 32]."""
    parts = blocks.reshape(-1, 8, 32)
    lowest = np.minimum(parts.min(axis=2), 0)
    wanted = (parts.max(axis=2) - lowest) / most
    d = (wanted.max(axis=1, keepdims=True) / 63).astype(np.float16)
    dmin = (-lowest.min(axis=1, keepdims=True) / 63).astype(np.float16)
    scales = np.clip(np.rint(wanted / d), 1, 63).astype(np.uint8)
    minima = np.clip(np.rint(-lowest / dmin), 0, 63).astype(np.uint8)
    steps, offsets = d.astype(np.float32) * scales, dmin.astype(np.float32) * minima
    quants = np.clip(np.rint((parts + offsets[:, :, None]) / steps[:, :, None]), 0, most).astype(np.uint8)
    packed = (
        scales[:, :4] | scales[:, 4:] >> 4 << 6,
        minima[:, :4] | minima[:, 4:] >> 4 << 6,
        scales[:, 4:] & 15 | minima[:, 4:] << 4,
    )
    return np.concatenate((d.view(np.uint8), dmin.view(np.uint8), *packed), axis=1), quants


def _pair_nibbles(quants: Bytes) -> Bytes:
    """Pack [blocks, 8, 32]: of two parts after each other the first has the low halves."""
    pairs = quants.reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(quants), 128)
