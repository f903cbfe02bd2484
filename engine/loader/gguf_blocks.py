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


def _decode_q4_0(raw: bytes) -> FloatArray:
    """Blocks of 32: a float16 scale d and nibbles q (see `_nibbles`); value = d (q - 8)."""
    blocks = np.frombuffer(raw, np.dtype([("d", "<f2"), ("q", "u1", (16,))]))
    return _scaled(_nibbles(blocks["q"]) - 8, blocks["d"])


def _decode_q4_1(raw: bytes) -> FloatArray:
    """Blocks of 32: float16 d and m, and nibbles q; value = d q + m."""
    blocks = np.frombuffer(raw, np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", (16,))]))
    return _scaled(_nibbles(blocks["q"]), blocks["d"], blocks["m"])


def _decode_q5_0(raw: bytes) -> FloatArray:
    """As Q4_0, with a fifth bit per element in a 32-bit word of their order; value = d (q - 16)."""
    blocks = np.frombuffer(raw, np.dtype([("d", "<f2"), ("high", "u1", (4,)), ("q", "u1", (16,))]))
    return _scaled((_nibbles(blocks["q"]) | _bits(blocks["high"]) << 4) - 16, blocks["d"])


def _decode_q5_1(raw: bytes) -> FloatArray:
    """As Q4_1, with a fifth bit per element; value = d q + m."""
    blocks = np.frombuffer(raw, np.dtype([("d", "<f2"), ("m", "<f2"), ("high", "u1", (4,)), ("q", "u1", (16,))]))
    return _scaled(_nibbles(blocks["q"]) | _bits(blocks["high"]) << 4, blocks["d"], blocks["m"])


def _decode_q4_k(raw: bytes) -> FloatArray:
    """Blocks of 256 in 8 parts of 32, each with 6-bit scale and minimum; value = d scale q - dmin minimum."""
    layout = [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", (12,)), ("q", "u1", (128,))]
    blocks = np.frombuffer(raw, np.dtype(layout))
    return _scaled_parts(_nibbles(blocks["q"].reshape(-1, 4, 32)).reshape(-1, 8, 32), blocks)


def _decode_q5_k(raw: bytes) -> FloatArray:
    """As Q4_K, with a fifth bit: bit i of `high[j]` belongs to element j of part i."""
    layout = [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", (12,)), ("high", "u1", (32,)), ("q", "u1", (128,))]
    blocks = np.frombuffer(raw, np.dtype(layout))
    fifth = blocks["high"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    quants = _nibbles(blocks["q"].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _scaled_parts(quants | fifth.astype(np.int8) << 4, blocks)


def _decode_q6_k(raw: bytes) -> FloatArray:
    """Blocks of 256: 4 low and 2 high bits per element, 16 parts of 16 with an int8 scale; value = d scale (q - 32).

    Each half of 128 elements has 64 bytes of nibbles, and 32 bytes whose four pairs of bits belong to its quarters.
    """
    layout = [("low", "u1", (2, 64)), ("high", "u1", (2, 32)), ("scales", "i1", (16,)), ("d", "<f2")]
    blocks = np.frombuffer(raw, np.dtype(layout))
    low = _nibbles(blocks["low"]).reshape(-1, 2, 4, 32)
    high = blocks["high"][:, :, None, :] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    quants = ((low | high.astype(np.int8) << 4) - 32).reshape(-1, 16, 16)
    scales = blocks["d"].astype(np.float32)[:, None] * blocks["scales"].astype(np.float32)
    return quants.astype(np.float32) * scales[:, :, None]


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Return int8 [..., 2 n] for bytes [..., n]: all low halves, then all high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1).astype(np.int8)


def _bits(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Return int8 [..., 8 n], lowest bit of each byte first."""
    return np.unpackbits(packed, axis=-1, bitorder="little").astype(np.int8)


def _scaled(
    quants: NDArray[np.int8], scale: NDArray[np.float16], minimum: NDArray[np.float16] | None = None
) -> FloatArray:
    values = quants.astype(np.float32)
    values *= scale.astype(np.float32)[:, None]
    if minimum is not None:
        values += minimum.astype(np.float32)[:, None]
    return values


def _scaled_parts(quants: NDArray[np.int8], blocks: NDArray[np.void]) -> FloatArray:
    """Apply the 6-bit scales and minima of Q4_K and Q5_K to int8 [blocks, 8, 32].

    Of the 12 bytes, 0-3 and 4-7 hold scales and minima of parts 0-3 in their low 6 bits; 8-11 hold the low nibbles of
    both for parts 4-7, whose two high bits are on top of the first 8 bytes.
    """
    first, second, third = (blocks["scales"][:, start : start + 4] for start in (0, 4, 8))
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=1).astype(np.float32)
    minima = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=1).astype(np.float32)
    values = quants.astype(np.float32)
    values *= (blocks["d"].astype(np.float32)[:, None] * scales)[:, :, None]
    values -= (blocks["dmin"].astype(np.float32)[:, None] * minima)[:, :, None]
    return values


_DECODERS = {
    "F32": _decode_f32,
    "F16": _decode_f16,
    "BF16": _decode_bf16,
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
    "Q5_0": _decode_q5_0,
    "Q5_1": _decode_q5_1,
    "Q8_0": _decode_q8_0,
    "Q4_K": _decode_q4_k,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
}
