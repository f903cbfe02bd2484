"""Small arrays on their way to the device and back, so that the host never waits for a copy.

A step sends what it needs in one copy out of pinned memory and takes its tokens back into pinned memory. On a CPU there
is nothing to copy. Knows no plans and no models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
"""Kernels are compiled for pointers that are multiples of this."""

_DEPTH = 16
"""Copies out that may be under way; with more the next one waits for the oldest. A step sends up to six, and the one
before may still be running."""


class _Buffer:
    """Pinned bytes, and the event after which they may be written again."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._in_use = False

    def take(self, size: int) -> tuple[Tensor, NDArray[np.uint8]]:
        if self._in_use:
            self._copied.synchronize()
        if len(self._bytes) < size:
            self._bytes = torch.empty(max(size, 1 << 16), dtype=torch.uint8, pin_memory=True)
        return self._bytes[:size], self._bytes.numpy()

    def sent(self) -> None:
        self._copied.record()
        self._in_use = True


class Staging:
    """Belongs to one stream: copies are in the order of the step's kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._buffers = [_Buffer() for _ in range(_DEPTH)] if self._on_cuda else []
        self._next = 0

    def to_device(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Return tensors of the arrays' types and shapes. The arrays may change afterwards, except on a CPU."""
        if not self._on_cuda:
            return [torch.from_numpy(array) for array in arrays]
        ends = np.cumsum([_aligned(array.nbytes) for array in arrays]).tolist()
        buffer = self._buffer()
        pinned, host = buffer.take(ends[-1])
        starts = [0, *ends[:-1]]
        for start, array in zip(starts, arrays, strict=True):
            host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        device = torch.empty(ends[-1], dtype=torch.uint8, device=self._device)
        device.copy_(pinned, non_blocking=True)
        buffer.sent()
        return [
            device[start : start + array.nbytes].view(_DTYPES[array.dtype.type]).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def fill(self, target: Tensor, values: NDArray[np.int32]) -> None:
        """Copy int32 values to the beginning of `target`, int32 on the device. Both have one dimension."""
        if not self._on_cuda:
            target[: values.size].copy_(torch.from_numpy(values))
            return
        buffer = self._buffer()
        pinned, host = buffer.take(values.nbytes)
        host[: values.nbytes].view(np.int32)[...] = values
        target[: values.size].copy_(pinned.view(torch.int32), non_blocking=True)
        buffer.sent()

    def _buffer(self) -> _Buffer:
        self._next = (self._next + 1) % _DEPTH
        return self._buffers[self._next]


@dataclass(eq=False, slots=True)
class ReturnedTokens:
    """int64 values that are on their way back. `list()` is for after the event that follows the copy."""

    _host: Tensor
    _count: int

    def list(self) -> list[int]:
        ids: list[int] = self._host[: self._count].tolist()
        return ids


class TokenReturns:
    """Pinned memory for the tokens of the steps in flight."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._max_rows, self._pin = max_rows, device.type == "cuda"
        self._free: list[Tensor] = []

    def start(self, tokens: Tensor) -> ReturnedTokens:
        """Begin to copy int64 [rows]; give the result back with `end` when it has been read."""
        host = self._free.pop() if self._free else self._new()
        host[: len(tokens)].copy_(tokens, non_blocking=True)
        return ReturnedTokens(host, len(tokens))

    def end(self, returned: ReturnedTokens) -> None:
        self._free.append(returned._host)

    def _new(self) -> Tensor:
        return torch.empty(self._max_rows, dtype=torch.int64, pin_memory=self._pin)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


_DTYPES: dict[type, torch.dtype] = {
    np.int32: torch.int32,
    np.int64: torch.int64,
    np.float32: torch.float32,
    np.float64: torch.float64,
}
