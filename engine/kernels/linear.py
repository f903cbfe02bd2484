"""x W^T + b in Triton, bitwise independent of how many tokens share the call.

What fixes the bits is the tree in which K is summed, and that depends on the weight's shape alone: `k_chunks(N, K)`
chunks, each one chain of tensor-core products in ascending K, added up in float32 in ascending order. Everything else
(tile sizes, stages, whether chunks run in one program or side by side) only moves time. Weight rows are the M of the
tensor core and tokens its N, so one token wastes nothing and every call uses the same instruction. A weight of 8 bits
(engine/layers/fp8.py) becomes the tokens' type when it has been read, which loses nothing; its scales come last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.chain import chained, wait
from engine.kernels.shared_memory import buffers_that_fit

_MIN_CHUNK = 256
_TARGET_PROGRAMS = 256
_TILE_N = 64
_TOKEN_GROUP = 8
MAX_TILES = 1 << 16
"""Tiles of one launch whose chunks run side by side: a counter each, allocated once per device."""

_arrivals: dict[torch.device, Tensor] = {}


@dataclass(frozen=True, slots=True)
class LinearTiles:
    """Shape of one launch. `tile_n` is a multiple of 64, so that Hopper always takes its warpgroup instruction, and
    `tile_k` divides 128, the grain of a chunk.
    """

    tile_n: int
    tile_t: int
    tile_k: int
    warps: int
    stages: int


def k_chunks(n: int, k: int) -> int:
    """Return into how many chunks K is cut, a function of the weight's shape alone.

    Narrow weights get more, so that a decode step's product has about two programs per multiprocessor to stream it.
    """
    chunks = 1
    while 2 * chunks * triton.cdiv(n, _TILE_N) <= _TARGET_PROGRAMS and k >= 2 * chunks * _MIN_CHUNK:
        chunks *= 2
    return chunks


def tiles_for(tokens: int) -> LinearTiles:
    """Return the tiles for a number of tokens. They never touch the bits."""
    if tokens <= 64:
        return LinearTiles(tile_n=64, tile_t=max(16, triton.next_power_of_2(tokens)), tile_k=128, warps=4, stages=4)
    if tokens <= 256:
        return LinearTiles(tile_n=64, tile_t=128, tile_k=64, warps=4, stages=4)
    return LinearTiles(tile_n=128, tile_t=128, tile_k=64, warps=8, stages=4)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    tiles: LinearTiles | None = None,
    *,
    scales: Tensor | None = None,
) -> Tensor:
    """Return [tokens, n] in x's dtype for x [tokens, k] (rows may be strided) and weight [n, k], of x's dtype or e4m3;
    its rows are multiplied by `scales` float32 [n]."""
    tokens, k = x.shape
    n = weight.shape[0]
    out = x.new_empty(tokens, n)
    if tokens == 0:
        return out
    tiles = tiles or tiles_for(tokens)
    chunks = k_chunks(n, k)
    chunk_k = triton.cdiv(triton.cdiv(k, chunks), 128) * 128
    tiles_n, tiles_t = triton.cdiv(n, tiles.tile_n), triton.cdiv(tokens, tiles.tile_t)
    side_by_side = chunks > 1 and tiles_n * tiles_t < _TARGET_PROGRAMS
    partial = x.new_empty((chunks, tokens, n) if side_by_side else (1,), dtype=torch.float32)
    _linear_kernel[(tiles_n * tiles_t, chunks if side_by_side else 1)](
        out,
        x,
        weight,
        bias,
        scales,
        partial,
        _counters(x.device),
        tokens,
        n,
        x.stride(0),
        K=k,
        CHUNKS=chunks,
        CHUNK_K=chunk_k,
        SIDE_BY_SIDE=side_by_side,
        TILE_N=tiles.tile_n,
        TILE_T=tiles.tile_t,
        TILE_K=tiles.tile_k,
        TOKEN_GROUP=_TOKEN_GROUP,
        num_warps=tiles.warps,
        num_stages=buffers_that_fit(
            x.device,
            0,
            (tiles.tile_n * weight.element_size() + tiles.tile_t * x.element_size()) * tiles.tile_k,
            tiles.stages,
        ),
        **chained(x.device),
    )
    return out


def _counters(device: torch.device) -> Tensor:
    if device not in _arrivals:
        _arrivals[device] = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
    return _arrivals[device]


@triton.jit
def _sum_chunk(
    x_rows, w_rows, token_mask, begin, end, K: tl.constexpr, TILE_N: tl.constexpr, TILE_T: tl.constexpr,
    TILE_K: tl.constexpr,
):  # fmt: skip
    """Return float32 [TILE_N, TILE_T]: the products over K in [begin, end), in ascending order."""
    acc = tl.zeros((TILE_N, TILE_T), tl.float32)
    for start in tl.range(begin, end, TILE_K):
        k = start + tl.arange(0, TILE_K)
        if K % TILE_K == 0:
            w = tl.load(w_rows + k[None, :])
            x = tl.load(x_rows + k[None, :], mask=token_mask[:, None], other=0.0)
        else:
            w = tl.load(w_rows + k[None, :], mask=(k < K)[None, :], other=0.0)
            x = tl.load(x_rows + k[None, :], mask=token_mask[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(w.to(x.dtype), tl.trans(x), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["tokens"])
def _linear_kernel(
    out,
    x,
    weight,
    bias,
    scales,
    partial,
    arrivals,
    tokens,
    n_size,
    stride_x,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_K: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_K: tl.constexpr,
    TOKEN_GROUP: tl.constexpr,
    CHAINED: tl.constexpr = False,
):
    """Grid (tiles of N x tiles of tokens, chunks or 1). With SIDE_BY_SIDE the last chunk to arrive adds up all."""
    tiles_n = tl.cdiv(n_size, TILE_N)
    tiles_t = tl.cdiv(tokens, TILE_T)
    # A few token tiles share each stripe of the weight while it is in L2.
    tile = tl.program_id(0)
    group = tile // (TOKEN_GROUP * tiles_n)
    group_size = tl.minimum(tiles_t - group * TOKEN_GROUP, TOKEN_GROUP)
    in_group = tile % (TOKEN_GROUP * tiles_n)
    token = (group * TOKEN_GROUP + in_group % group_size) * TILE_T + tl.arange(0, TILE_T)
    row = in_group // group_size * TILE_N + tl.arange(0, TILE_N)
    token_mask = token < tokens
    x_rows = x + token.to(tl.int64)[:, None] * stride_x
    w_rows = weight + (row % n_size).to(tl.int64)[:, None] * K
    out_offsets = token.to(tl.int64)[None, :] * n_size + row[:, None]
    out_mask = token_mask[None, :] & (row < n_size)[:, None]

    wait(CHAINED)
    total = tl.zeros((TILE_N, TILE_T), tl.float32)
    if SIDE_BY_SIDE:
        chunk = tl.program_id(1)
        end = tl.minimum((chunk + 1) * CHUNK_K, K)
        acc = _sum_chunk(x_rows, w_rows, token_mask, chunk * CHUNK_K, end, K, TILE_N, TILE_T, TILE_K)
        chunk_stride = tokens.to(tl.int64) * n_size
        tl.store(partial + chunk * chunk_stride + out_offsets, acc, mask=out_mask)
        tl.debug_barrier()  # every thread's partials are stored before one thread announces them
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") != CHUNKS - 1:
            return
        tl.debug_barrier()
        for other in range(CHUNKS):
            # .cg: partials of other multiprocessors must come from L2.
            offsets = other * chunk_stride + out_offsets
            total += tl.load(partial + offsets, mask=out_mask, other=0.0, cache_modifier=".cg")
        tl.store(arrivals + tile, 0)
    else:
        for chunk in range(CHUNKS):
            end = tl.minimum((chunk + 1) * CHUNK_K, K)
            total += _sum_chunk(x_rows, w_rows, token_mask, chunk * CHUNK_K, end, K, TILE_N, TILE_T, TILE_K)
    if scales is not None:
        total *= tl.load(scales + row, mask=row < n_size, other=0.0)[:, None]
    if bias is not None:
        total += tl.load(bias + row, mask=row < n_size, other=0.0).to(tl.float32)[:, None]
    tl.store(out + out_offsets, total.to(out.dtype.element_ty), mask=out_mask)
