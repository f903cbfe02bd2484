"""A step's computation that can be captured as a CUDA graph and replayed. Knows nothing of what it computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class GraphedStep:
    """`compute` returns the step's logits; a call runs it, captured or not. `logits` are of the last call, and valid
    until any other step of the same memory pool runs."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._replay: Callable[[], None] | None = None
        self._logits: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        assert self._logits is not None, "the step has not run"
        return self._logits

    def __call__(self) -> None:
        if self._replay is not None:
            self._replay()
        else:
            self._logits = self._compute()

    def rehearse(self) -> None:
        """Compute and forget."""
        self._compute()

    def capture(self, pool: object, stream: torch.cuda.Stream) -> None:
        """Make a graph. The step has run once, so that nothing is compiled or set up inside."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool)  # type: ignore[arg-type]
            logits = self._compute()
            graph.capture_end()
        # An owner would keep the memory from the graphs that are captured later: they would not share it.
        self._logits = _borrow(logits)
        self._replay = graph.replay


class _Memory:
    """Memory of the device that somebody else owns, as torch.as_tensor takes it."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _borrow(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's twin on the same memory, without a share in its ownership."""
    assert tensor.is_contiguous()
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)
