"""Decodes GGUF tensor blocks to float32 arrays. Knows the bytes of one tensor and nothing about files or models."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.loader.gguf import BlockFormat

FloatArray = NDArray[np.float32]


def decode(raw: bytes, layout: BlockFormat, shape: tuple[int, ...]) -> FloatArray:
    """Return the tensor's values, float32 of `shape`; `raw` holds exactly its blocks (checked by the reader)."""
    return _DECODERS[layout.name](raw).reshape(shape)


def _decode_f32(raw: bytes) -> FloatArray:
    return np.frombuffer(raw, "<f4").astype(np.float32)


def _decode_f16(raw: bytes) -> FloatArray:
    return np.frombuffer(raw, "<f2").astype(np.float32)


def _decode_bf16(raw: bytes) -> FloatArray:
    # bfloat16 is the upper half of a float32.
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)


def _decode_q8_0(raw: bytes) -> FloatArray:
    """Blocks of 32: a float16 scale d and 32 int8 q; value = d q."""
    blocks = np.frombuffer(raw, np.dtype([("d", "<f2"), ("q", "i1", (32,))]))
    values = blocks["q"].astype(np.float32)
    values *= blocks["d"].astype(np.float32)[:, None]
    return values


def _decode_q4_1(raw: bytes) -> FloatArray:
    """Blocks of 32: float16 d and m, 16 bytes whose low nibbles are q of elements 0-15, high of 16-31; d q + m."""
    blocks = np.frombuffer(raw, np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", (16,))]))
    values = np.empty((len(blocks), 32), np.float32)
    values[:, :16] = blocks["q"] & 15
    values[:, 16:] = blocks["q"] >> 4
    values *= blocks["d"].astype(np.float32)[:, None]
    values += blocks["m"].astype(np.float32)[:, None]
    return values


_DECODERS = {
    "F32": _decode_f32,
    "F16": _decode_f16,
    "BF16": _decode_bf16,
    "Q8_0": _decode_q8_0,
    "Q4_1": _decode_q4_1,
}
