"""Packing chunks of the KV cache into one piece of memory, and unpacking them, in Triton.

For copies between device and host: small chunks cost a copy engine more than their bytes, one large copy does not. A
chunk is any run of bytes that lies together in the cache; the kernel gets its address.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD_BYTES = 4
GRAIN_BYTES = 16
"""Addresses and sizes of chunks are multiples of this, so that a thread moves 16 bytes at once."""

_WIDTH = 4096
_WARPS = 4


@triton.jit
def move_chunks_kernel(packed, addresses, chunk_words, PACKS: tl.constexpr, WIDTH: tl.constexpr):
    """One program moves WIDTH words of one chunk. Chunks at address 0 are packed as zeros, and not unpacked."""
    chunk = tl.program_id(0)
    lane = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = lane < chunk_words
    address = tl.load(addresses + chunk)
    there = lane < tl.where(address != 0, chunk_words, 0)
    place = packed + chunk.to(tl.int64) * chunk_words + lane
    block = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16) + lane
    if PACKS:
        tl.store(place, tl.load(block, mask=there, other=0), mask=inside)
    else:
        tl.store(block, tl.load(place, mask=inside), mask=there)


def pack_chunks(packed: Tensor, addresses: Tensor, chunk_bytes: int) -> None:
    """Copy chunks, which lie at `addresses` (int64 [chunks], 0 for zeros), one after another into `packed` (uint8)."""
    _move(packed, addresses, chunk_bytes, packs=True)


def unpack_chunks(packed: Tensor, addresses: Tensor, chunk_bytes: int) -> None:
    """Copy chunks out of `packed` to where `addresses` says; those with 0 are left out."""
    _move(packed, addresses, chunk_bytes, packs=False)


def _move(packed: Tensor, addresses: Tensor, chunk_bytes: int, *, packs: bool) -> None:
    chunk_words = chunk_bytes // WORD_BYTES
    grid = (len(addresses), triton.cdiv(chunk_words, _WIDTH))
    move_chunks_kernel[grid](
        packed.view(torch.int32), addresses, chunk_words, PACKS=packs, WIDTH=_WIDTH, num_warps=_WARPS
    )
