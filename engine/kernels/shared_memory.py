"""How deep a kernel may pipeline its loads on the device at hand: no list of chips, only the size of shared memory."""

from __future__ import annotations

from functools import cache

import torch
import triton

_INTERPRETER_BYTES = 1 << 17
_RESERVED_BYTES = 8 << 10
"""What a kernel needs beside its tiles: reductions and layout changes."""


@cache
def _limit_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETER_BYTES
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def buffers_that_fit(device: torch.device, fixed_bytes: int, buffer_bytes: int, wanted: int) -> int:
    """Return how many buffers of one loop iteration's tiles fit beside `fixed_bytes`: from 1 to `wanted`."""
    free_bytes = _limit_bytes(device) - fixed_bytes - _RESERVED_BYTES
    return max(1, min(wanted, free_bytes // buffer_bytes))
