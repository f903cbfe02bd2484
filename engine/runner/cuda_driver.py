"""Calls of the CUDA driver that torch has no name for: copies between plain addresses, many in one call.

Every call lets go of the interpreter. Raises CopyError with the driver's number for what it refuses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_LIBRARY = "libcuda.so.1"
_IN_STREAM_ORDER = 1
_PORTABLE = 1

Addresses = NDArray[np.int64]


class CopyError(RuntimeError):
    """The driver refused a call."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: in what order sources are read, and hints for managed memory, which nothing here is."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class CudaDriver:
    """Works in the context that is current in the thread that makes it. Usable from any thread."""

    def __init__(self, *, batches: bool = True) -> None:
        self._library = ctypes.CDLL(_LIBRARY)
        self._context = ctypes.c_void_p()
        self._check("cuCtxGetCurrent", self._library.cuCtxGetCurrent(ctypes.byref(self._context)))
        self._start_batch = self._batch_call() if batches else None

    @property
    def has_batches(self) -> bool:
        """Whether one call starts many copies: from CUDA 12.8 on."""
        return self._start_batch is not None

    def start_copies(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: torch.cuda.Stream) -> None:
        """Start copies of `sizes[i]` bytes, in no order among each other, in a stream that is not the default one.
        All host memory in them has to be pinned."""
        if not len(sizes):
            return
        self._enter()
        queue = ctypes.c_void_p(stream.cuda_stream)
        if self._start_batch is not None:
            self._start_batch(_pointer(targets), _pointer(sources), _pointer(sizes), len(sizes), queue)
            return
        copy, size_t, address = self._library.cuMemcpyAsync, ctypes.c_size_t, ctypes.c_uint64
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self._check("cuMemcpyAsync", copy(address(target), address(source), size_t(size), queue))

    def pin(self, address: int, size_bytes: int) -> bool:
        """Pin host memory for copies; return whether the driver could. It holds up the device's other users."""
        self._enter()
        return not self._library.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), ctypes.c_uint(_PORTABLE)
        )

    def unpin(self, address: int) -> None:
        self._enter()
        self._check("cuMemHostUnregister", self._library.cuMemHostUnregister(ctypes.c_void_p(address)))

    def _batch_call(self) -> Callable[..., None] | None:
        """Return cuMemcpyBatchAsync, which has lost a parameter with CUDA 13, or None."""
        size_t = ctypes.c_size_t
        attributes = _Attributes(source_order=_IN_STREAM_ORDER)
        first = size_t(0)
        shared = (ctypes.byref(attributes), ctypes.byref(first), size_t(1))
        name = "cuMemcpyBatchAsync_v2"
        failed_at: tuple[Any, ...] = ()
        if not hasattr(self._library, name):
            name, failed_at = "cuMemcpyBatchAsync", (ctypes.byref(size_t()),)
        if not hasattr(self._library, name):
            return None
        call = getattr(self._library, name)
        return lambda targets, sources, sizes, count, queue: self._check(
            name, call(targets, sources, sizes, size_t(count), *shared, *failed_at, queue)
        )

    def _enter(self) -> None:
        self._check("cuCtxSetCurrent", self._library.cuCtxSetCurrent(self._context))

    def _check(self, call: str, code: int) -> None:
        if code:
            raise CopyError(f"{call} failed with CUDA error {code}")


def _pointer(values: Addresses) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.ctypes.data)
