"""All kernels that a model's steps will launch, compiled while its weights are read.

A rehearsal runs every step that will be captured, on one layer of each kind, a cache of nothing and weights that are
not there yet. Nothing of ours is launched (engine/kernels/ahead.py), and what torch's operators compute is garbage that
nobody reads. If it fails, kernels are compiled when they are needed, as ever.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import torch

from engine.kernels.ahead import KernelsAhead
from engine.models.llama import Llama
from engine.runner.kv_cache import KVCache
from engine.runner.runner import TorchRunner

log = logging.getLogger(__name__)

MAX_THREADS = 16

MakeRunner = Callable[[Llama, KVCache], TorchRunner]


class Rehearsal:
    """Begins in a thread of its own, on the current CUDA device. `make_runner` makes it as it will be."""

    def __init__(
        self,
        model: Llama,
        make_runner: MakeRunner,
        block_size: int,
        kv_dtype: torch.dtype,
        local_engines: int = 1,
    ) -> None:
        self._model, self._make_runner, self._block_size, self._kv_dtype = model, make_runner, block_size, kv_dtype
        threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // local_engines))
        self._device_index = torch.cuda.current_device()
        self._kernels = KernelsAhead(self._device_index, threads)
        self._thread = threading.Thread(target=self._run, name="rehearsal", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when all kernels are there, and give back the memory that this took."""
        self._thread.join()
        self._kernels.wait()
        torch.cuda.empty_cache()

    def _run(self) -> None:
        torch.cuda.set_device(self._device_index)
        try:
            part = self._model.excerpt()
            groups = part.kv_groups()
            device = part.embedding.device
            cache = KVCache(groups, (2,) * len(groups), self._block_size, self._kv_dtype, device, keeps_finite=False)
            runner = self._make_runner(part, cache)
            with self._kernels.asking():
                runner.rehearse()
        except Exception:
            log.warning("kernels are not compiled ahead", exc_info=True)
