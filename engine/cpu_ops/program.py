"""A list of jobs over buffers, run on the tokens of a step. Knows the operators' shapes, no model's order of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.base import AttentionBatch
from engine.cpu_ops.abi import Group, Job, JobKind, LinearMode, Step
from engine.cpu_ops.library import Library
from engine.cpu_ops.packing import ELEMENT_TYPES, GROUP, PackedWeight

_ROW_PADDING = 16
"""Floats between rows, so that rows of a power of two do not fall on the same lines of a cache."""


class Program:
    """Jobs are added once, in order; `run` computes them. Owns the buffers, and keeps every tensor that a job reads.

    Buffers are float32 rows, one for each token, named by number.
    """

    def __init__(self, library: Library, widths: Sequence[int], threads: int) -> None:
        self._library, self._threads = library, threads
        self._widths = tuple(widths)
        self._buffers: list[Tensor] = []
        self._jobs: list[Job] = []
        self._array: ctypes.Array[Job] | None = None
        self._layers: list[tuple[int, int]] = []
        self._kept: list[Tensor] = []
        self._caches: object = None
        self._step = Step()

    def embed(self, target: int, table: Tensor) -> None:
        """target = rows of `table` [vocab, size] by token id."""
        weight = self._pointer(table)
        self._add(JobKind.EMBED, target=target, type=ELEMENT_TYPES[table.dtype], weight=weight, inputs=table.shape[1])

    def norm(self, source: int, target: int, weight: Tensor, eps: float) -> None:
        """target = RMSNorm of source, over len(weight) values."""
        scale = self._pointer(weight.float())
        self._add(JobKind.NORM, source=source, target=target, weight=scale, inputs=len(weight), eps=eps)

    def quantize(self, source: int, target: int, inputs: int) -> None:
        """target [tokens, quantized_width(inputs)] = source [tokens, inputs] in 8 bits, with a scale for each group."""
        self._add(JobKind.QUANTIZE, source=source, target=target, inputs=inputs)

    def linear(
        self, source: int, target: int, weight: PackedWeight, bias: Tensor | None, mode: LinearMode = LinearMode.STORE
    ) -> None:
        """target = (or +=) source W^T + b; with SILU_MUL silu(gate) * up of it. `bias` is one of `pack_bias`. The
        source of an int8 weight is one that `quantize` has made."""
        assert weight.paired == (mode == LinearMode.SILU_MUL)
        self._add(
            JobKind.LINEAR,
            source=source,
            target=target,
            type=weight.type,
            weight=self._pointer(weight.words),
            bias=None if bias is None else self._pointer(bias),
            outputs=weight.outputs,
            inputs=weight.inputs,
            mode=mode,
        )

    def rotate_and_write(
        self,
        source: int,
        heads: tuple[int, int, int],
        tables: tuple[Tensor, Tensor],
        *,
        layer: int,
        group: int,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> None:
        """Norm (if told) and rotate query and key of source [tokens, (heads + 2 * kv_heads) * head_dim] in place, and
        write key and value to the layer's cache. `heads` are (heads, kv_heads, head_dim), `group` is the KV group."""
        cos, sin = (self._pointer(table) for table in tables)
        query_norm, key_norm = (None, None) if norms is None else (self._pointer(norm.float()) for norm in norms)
        self._add(
            JobKind.ROTATE_WRITE,
            layer=layer,
            source=source,
            cos=cos,
            sin=sin,
            query_norm=query_norm,
            key_norm=key_norm,
            eps=eps,
            group=group,
            heads=heads[0],
            kv_heads=heads[1],
            head_dim=heads[2],
        )

    def attend(
        self,
        source: int,
        target: int,
        heads: tuple[int, int, int],
        *,
        layer: int,
        group: int,
        scale: float,
        window: int | None,
    ) -> None:
        """target [tokens, heads * head_dim] = attention of source's queries over the layer's cache."""
        self._add(
            JobKind.ATTEND,
            layer=layer,
            source=source,
            target=target,
            group=group,
            heads=heads[0],
            kv_heads=heads[1],
            head_dim=heads[2],
            window=window or 0,
            scale=scale,
        )

    def run(
        self,
        tokens: int,
        external: dict[int, Tensor],
        *,
        token_ids: Tensor | None = None,
        batches: Sequence[AttentionBatch] = (),
        caches: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        """Run all jobs. `external` are buffers of the caller's for this once, float32 [tokens, width].

        `batches` has one entry for each KV group, `caches` one for each layer. All tensors stay alive until it returns.
        """
        if self._array is None:
            self._array = (Job * len(self._jobs))(*self._jobs)
        if caches is not self._caches:
            self._bind(caches)
        self._place(tokens, external)
        step = self._step
        step.tokens = tokens
        if token_ids is not None:
            step.token_ids = _address(token_ids, torch.int64)
        if batches:
            first = batches[0]
            step.rows, step.block_size = len(first.host_query_lens), first.block_size
            step.positions = _address(first.positions, torch.int64)
            step.query_starts = _address(first.query_starts, torch.int32)
            step.kv_lens = _address(first.kv_lens, torch.int32)
            groups = (Group * len(batches))(*(_group(batch) for batch in batches))
            step.groups = ctypes.addressof(groups)
        self._library.run(self._array, step, self._threads)

    def _place(self, tokens: int, external: dict[int, Tensor]) -> None:
        step = self._step
        if not self._buffers or len(self._buffers[0]) < tokens:
            rows = max(16, tokens)
            self._buffers = [torch.zeros(rows, width + _ROW_PADDING if width else 0) for width in self._widths]
        for index, buffer in enumerate(self._buffers):
            buffer = external.get(index, buffer)
            assert buffer.dtype == torch.float32
            step.buffers[index], step.strides[index] = buffer.data_ptr(), buffer.stride(0)

    def _bind(self, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Tell the jobs where the layers' caches are: the same tensors step by step."""
        assert self._array is not None
        for index, layer in self._layers:
            job, (keys, values) = self._array[index], caches[layer]
            assert keys.is_contiguous()
            assert values.is_contiguous()
            job.type = ELEMENT_TYPES[keys.dtype]
            job.k_cache, job.v_cache = keys.data_ptr(), values.data_ptr()
        self._caches = caches

    def _add(self, kind: JobKind, *, layer: int | None = None, **fields: float | None) -> None:
        if layer is not None:
            self._layers.append((len(self._jobs), layer))
        self._jobs.append(Job(kind=kind, **fields))
        self._array = None

    def _pointer(self, tensor: Tensor) -> int:
        contiguous = tensor.detach().contiguous()
        self._kept.append(contiguous)
        return contiguous.data_ptr()


def quantized_width(inputs: int) -> int:
    """Return the float32 columns of a buffer that hold a row of bytes and its scales."""
    groups = -(-inputs // GROUP)
    return groups * (GROUP // 4 + 1)


def _address(tensor: Tensor, dtype: torch.dtype) -> int:
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _group(batch: AttentionBatch) -> Group:
    tables = batch.block_tables
    assert tables.dtype == torch.int32
    assert tables.stride(1) == 1
    return Group(_address(batch.write_index, torch.int64), tables.data_ptr(), tables.stride(0))
