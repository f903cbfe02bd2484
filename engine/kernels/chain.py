"""Kernels that start while the one before them ends (programmatic dependent launch, compute capability 9.0 up).

A chained kernel is let onto the device as soon as every program of its predecessor has begun, and waits in `wait` until
that one is done and its results can be seen: its launch and what it does before the wait overlap with the other's tail.
Each chained kernel waits before it reads or writes what other kernels touch, so the order of results is the stream's.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

_FIRST_CAPABILITY = (9, 0)


@cache
def chained(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel that calls `wait`, {} where devices cannot chain."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return {}
    return {"CHAINED": True, "launch_pdl": True}


@triton.jit
def wait(CHAINED: tl.constexpr):
    """Let the next kernel begin, and wait for the one before."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
