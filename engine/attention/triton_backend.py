"""The Triton attention back ends: which kernel runs for which rows of a batch, and with which tiles.

Short rows (decode, drafts, the tail of a cached prompt) go to the kernel that splits the KV over programs, long rows to
the prefill kernel. Both read only device tensors, so a captured CUDA graph stays right when it is replayed with other
lengths, as long as its block table is as wide as the longest row needs and its rows stay as short as at capture.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from engine.attention.base import AttentionBatch
from engine.kernels.attention import prefill_attention_kernel, split_attention_kernel
from engine.kernels.chain import chained
from engine.kernels.kv import write_kv
from engine.kernels.rope import rotate_and_write_kv
from engine.kernels.shared_memory import buffers_that_fit

MAX_HEAD_SLOTS = 1 << 16
"""Rows times KV heads of one launch: a counter each, allocated once so that a captured graph may keep its address."""


FEW_PROGRAMS = 512
"""About four for each multiprocessor of a large GPU, which is how many it runs at once."""

LONG_ROW_TOKENS = 1024
"""From so many query tokens a row on, as a mean, Hopper's own prefill kernel is the faster one."""


_REGISTERS_OF_LANES = 2048
"""Registers of a multiprocessor for each of a warp's 32 lanes, from compute capability 3.7 on."""

_PAIRED_STAGES = 3
"""One KV tile on its way (`_Call._stages`)."""


@dataclass(frozen=True, slots=True)
class TritonTiles:
    """Shapes of the two kernels. `fold_splits`: prefill folds the KV at the same borders as the split kernel does.

    `kv_buffers` is how many KV tiles are on their way at once, as far as they fit in shared memory. `split_tokens` is a
    multiple of 2 * kv_tile. From `paired_prefills` programs on, two prefill programs share a multiprocessor, each with
    one KV tile on its way and half of the registers; 0 is never.
    """

    split_rows: int
    split_warps: int
    prefill_rows: int
    prefill_warps: int
    kv_tile: int
    kv_buffers: int
    split_tokens: int
    fold_splits: bool
    paired_prefills: int


DEFAULT_TILES = TritonTiles(
    split_rows=16,
    split_warps=4,
    prefill_rows=128,
    prefill_warps=8,
    kv_tile=64,
    kv_buffers=2,
    split_tokens=512,
    fold_splits=False,
    paired_prefills=1536,
)
# 64 rows in both: tensor cores add up a tile of 16 rows and one of 64 by different instructions.
INVARIANT_TILES = TritonTiles(
    split_rows=64,
    split_warps=4,
    prefill_rows=64,
    prefill_warps=4,
    kv_tile=64,
    kv_buffers=2,
    split_tokens=256,
    fold_splits=True,
    paired_prefills=0,
)


class TritonAttention:
    """`AttentionBackend` on GPUs. With `INVARIANT_TILES` a token's result is bitwise a function of its own prefix."""

    def __init__(self, name: str = "triton", tiles: TritonTiles = DEFAULT_TILES) -> None:
        self.name = name
        self._tiles = tiles
        self._hopper = None if tiles.fold_splits else _hopper_attention()
        self._arrivals: dict[torch.device, Tensor] = {}
        self._shaped: tuple[AttentionBatch, int, _RowLengths] | None = None

    def write_kv(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
        write_kv(key, value, k_cache, v_cache, batch.write_index, batch.block_size)

    def rotate_and_write_kv(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        return rotate_and_write_kv(
            qkv,
            batch.positions,
            cos,
            sin,
            k_cache,
            v_cache,
            batch.write_index,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
        )

    def attend(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window_tokens: int | None = None,
    ) -> Tensor:
        heads = query.shape[1]
        group = heads // k_cache.shape[1]
        tiles = self._tiles
        short_tokens = max(tiles.split_rows, _power_of_two(group)) // group
        lengths = self._row_lengths(batch, short_tokens)
        out = query.new_empty(query.shape)
        call = _Call(out, query, k_cache, v_cache, batch, group, scale * math.log2(math.e), window_tokens or 0, tiles)
        if lengths.longest_short:
            call.launch_split(lengths.longest_short * group, self._counters(query.device))
        if lengths.has_long:
            call.launch_prefill(short_tokens, self._hopper)
        return out

    def _row_lengths(self, batch: AttentionBatch, short_tokens: int) -> _RowLengths:
        """Looked at once per step: all layers of a KV group share the batch object."""
        kept = self._shaped
        if kept is None or kept[0] is not batch or kept[1] != short_tokens:
            lens = batch.host_query_lens
            longest_short = max((count for count in lens if count <= short_tokens), default=0)
            self._shaped = kept = (batch, short_tokens, _RowLengths(longest_short, max(lens) > short_tokens))
        return kept[2]

    def _counters(self, device: torch.device) -> Tensor:
        counters = self._arrivals.get(device)
        if counters is None:
            counters = torch.zeros(MAX_HEAD_SLOTS, dtype=torch.int32, device=device)
            self._arrivals[device] = counters
        return counters


@dataclass(frozen=True, slots=True)
class _RowLengths:
    """Query tokens of the longest row for the split kernel, 0 without one; whether a row is for the other."""

    longest_short: int
    has_long: bool


def _hopper_attention() -> ModuleType | None:
    """Gluon is young: where this Triton has another one, or none, its kernel is not missed."""
    try:
        return importlib.import_module("engine.kernels.hopper_attention")
    except ImportError:
        return None


def _power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`: the extents of Triton's tiles."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments that both kernels share."""

    out: Tensor
    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: AttentionBatch
    group: int
    scale_log2e: float
    window: int
    tiles: TritonTiles

    def _stages(self, rows: int) -> int:
        """Loads of KV hang on loads of the block table, and Triton shares the stages out between the two. Hopper's
        asynchronous products hold on to one tile more.
        """
        row_bytes = self.query.shape[2] * self.query.element_size()
        held_bytes = rows * row_bytes + 2 * self.tiles.kv_tile * row_bytes
        tile_bytes = 2 * self.tiles.kv_tile * self.query.shape[2] * self.k_cache.element_size()
        return 1 + 2 * buffers_that_fit(self.query.device, held_bytes, tile_bytes, self.tiles.kv_buffers)

    def _split_tokens(self, head_slots: int, table_tokens: int) -> int:
        """Return the split's size. A handful of rows is cut finer, or most of the device would have nothing to do;
        not where results may not depend on the batch."""
        split_tokens = self.tiles.split_tokens
        while not self.tiles.fold_splits and split_tokens > 2 * self.tiles.kv_tile:
            if head_slots * -(-table_tokens // split_tokens) >= FEW_PROGRAMS:
                break
            split_tokens //= 2
        return split_tokens

    def launch_split(self, packed_rows: int, counters: Tensor) -> None:
        batch, tiles, kv_heads = self.batch, self.tiles, self.k_cache.shape[1]
        rows, blocks = batch.block_tables.shape
        head_dim = self.query.shape[2]
        tile_rows = max(tiles.split_rows, _power_of_two(self.group))
        if rows * kv_heads > MAX_HEAD_SLOTS:
            raise ValueError(f"{rows} rows of {kv_heads} KV heads are more than {MAX_HEAD_SLOTS} in one launch")
        split_tokens = self._split_tokens(rows * kv_heads, blocks * batch.block_size)
        splits = -(-blocks * batch.block_size // split_tokens)
        partials = (rows, kv_heads, splits, packed_rows)
        split_attention_kernel[(splits, kv_heads, rows)](
            self.out,
            self.query,
            self.k_cache,
            self.v_cache,
            self.query.new_empty(*partials, head_dim, dtype=torch.float32),
            self.query.new_empty(partials, dtype=torch.float32),
            self.query.new_empty(partials, dtype=torch.float32),
            counters,
            batch.block_tables,
            batch.query_starts,
            batch.kv_lens,
            self.scale_log2e,
            self.query.stride(0),
            *self.k_cache.stride()[:3],
            batch.block_tables.stride(0),
            splits,
            packed_rows,
            GROUP=self.group,
            HEAD_DIM=head_dim,
            HEAD_PAD=_power_of_two(head_dim),
            BLOCK_SIZE=batch.block_size,
            ROWS=tile_rows,
            KV_TILE=tiles.kv_tile,
            SPLIT_TOKENS=split_tokens,
            WINDOW=self.window,
            num_warps=tiles.split_warps,
            num_stages=self._stages(tile_rows),
            **chained(self.query.device),
        )

    def launch_prefill(self, short_tokens: int, hopper: ModuleType | None) -> None:
        batch, tiles, kv_heads = self.batch, self.tiles, self.k_cache.shape[1]
        tokens, _, head_dim = self.query.shape
        rows = batch.block_tables.shape[0]
        has_long_rows = tokens >= rows * LONG_ROW_TOKENS and not self.window
        if has_long_rows and hopper is not None and hopper.available(self.query, self.k_cache, batch.block_size):
            hopper.prefill_attention(
                self.out,
                self.query,
                self.k_cache,
                self.v_cache,
                batch.block_tables,
                batch.query_starts,
                batch.kv_lens,
                scale_log2e=self.scale_log2e,
                short_tokens=short_tokens,
            )
            return
        tile_rows = max(tiles.prefill_rows, _power_of_two(self.group))
        grid = (tokens // (tile_rows // self.group) + rows, kv_heads)
        paired = 0 < tiles.paired_prefills <= grid[0] * grid[1] and self.query.device.type == "cuda"
        prefill_attention_kernel[grid](
            self.out,
            self.query,
            self.k_cache,
            self.v_cache,
            batch.block_tables,
            batch.query_starts,
            batch.kv_lens,
            self.scale_log2e,
            self.query.stride(0),
            *self.k_cache.stride()[:3],
            batch.block_tables.stride(0),
            rows,
            SHORT_TOKENS=short_tokens,
            GROUP=self.group,
            HEAD_DIM=head_dim,
            HEAD_PAD=_power_of_two(head_dim),
            BLOCK_SIZE=batch.block_size,
            ROWS=tile_rows,
            KV_TILE=tiles.kv_tile,
            SPLIT_TOKENS=tiles.split_tokens,
            WINDOW=self.window,
            FOLD_SPLITS=tiles.fold_splits,
            num_warps=tiles.prefill_warps,
            num_stages=_PAIRED_STAGES if paired else self._stages(tile_rows),
            **({"maxnreg": _REGISTERS_OF_LANES // (2 * tiles.prefill_warps)} if paired else {}),
        )
