"""Compiling kernels before they are launched, side by side.

Triton compiles a kernel at its first launch, in the launching thread, and loads it there. While a thread is `asking`,
its launches do nothing but name the kernel that they would need, and a pool of threads compiles and loads those: they
are there when they are launched. Knows no models; who asks launches what it will launch, on tensors that mean nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

log = logging.getLogger(__name__)


class KernelsAhead:
    """For one device. `wait` ends its threads."""

    def __init__(self, device_index: int, threads: int) -> None:
        self._device_index = device_index
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compile", initializer=self._enter)
        self._asked: dict[tuple[Any, str], Future[None]] = {}
        self._asking: int | None = None

    @property
    def count(self) -> int:
        return len(self._asked)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Launch nothing in this thread. Other threads go on as always."""
        asking, before, run = threading.get_ident(), knobs.runtime.jit_cache_hook, JITFunction.run

        def named(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            # A kernel that is in memory already is not launched either: what it reads another one has not written.
            return run(function, *args, grid=grid, warmup=warmup or threading.get_ident() == asking, **kwargs)

        self._asking = asking
        knobs.runtime.jit_cache_hook, JITFunction.run = self._on_missing, named
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook, JITFunction.run = before, run
            self._asking = None

    def wait(self) -> None:
        """Return when everything that was asked for has been compiled. What could not be is told by its launch."""
        self._pool.shutdown(wait=True)
        for (function, _), done in self._asked.items():
            if (error := done.exception()) is not None:
                log.warning("%s was not compiled ahead: %s", function, error)

    def _enter(self) -> None:
        torch.cuda.set_device(self._device_index)

    def _on_missing(self, *, key: str, fn: Any, compile: Any, **_: Any) -> bool:
        """Triton's hook: called where a kernel is not in memory; True leaves both compiling and launching out."""
        if threading.get_ident() != self._asking:
            return False
        name = (fn.jit_function, key)
        if name not in self._asked:
            self._asked[name] = self._pool.submit(_compile, fn.jit_function, compile["specialization_data"])
        return True


def _compile(function: Any, specialization: str) -> None:
    kernel = function.preload(specialization)
    # Its launcher is made, and the kernel loaded, when this is looked at.
    _ = kernel.run
