"""A scope in which the host may not wait for a device: what would make it wait raises HiddenWaitError instead.

For tests and benchmarks of launch code. It sees torch operators, and a CUDA build's own watch is switched on as well;
what a kernel launcher or a driver call does by itself it cannot see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten

_SIZED_BY_VALUES = (
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.unique_dim.default,
    _aten.repeat_interleave.Tensor,
)
"""The size of their result is known when the device has counted."""

_SCALARS = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default)
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)


class HiddenWaitError(RuntimeError):
    """Launch code would have waited for the device."""


class _WaitGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator returns
        kwargs = kwargs or {}
        if self._waits(func, args, kwargs):
            raise HiddenWaitError(f"{func} makes the host wait for device '{self._device_type}'")
        with self:
            # In inference mode composite operators arrive whole, `item` and `to` among them: look at their parts.
            made = func.decompose(*args, **kwargs)  # type: ignore[attr-defined]
        return func(*args, **kwargs) if made is NotImplemented else made

    def _waits(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if func in _SIZED_BY_VALUES or func in _SCALARS:
            return self._is_watched(args[0])
        if func in _INDEXING:
            masks = (one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8))
            return any(self._is_watched(mask) for mask in masks)
        if func is _aten._to_copy.default:
            wanted = kwargs.get("device")
            arrives = wanted is not None and torch.device(wanted).type == self._device_type
            crosses = wanted is not None and self._is_watched(args[0]) != arrives
            return crosses and not kwargs.get("non_blocking", False)
        if func is _aten.copy_.default:
            crosses = self._is_watched(args[1]) != self._is_watched(args[0])
            return crosses and not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return False

    def _is_watched(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and tensor.device.type == self._device_type


@contextmanager
def forbid_waits(device: torch.device) -> Iterator[None]:
    """Raise HiddenWaitError, or torch's own RuntimeError, where code inside would wait for `device`."""
    on_cuda = device.type == "cuda"
    before = torch.cuda.get_sync_debug_mode() if on_cuda else 0
    with _WaitGuard(device.type):
        if on_cuda:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if on_cuda:
                torch.cuda.set_sync_debug_mode(before)
