"""The compiled operators, loaded once a process. Knows job lists, no tensors and no models."""

from __future__ import annotations

import ctypes
import logging
import threading
from pathlib import Path

from engine.cpu_ops.abi import Job, Step
from engine.cpu_ops.build import find
from engine.errors import ConfigError

log = logging.getLogger(__name__)


class Library:
    """`lanes` is how many float32 a vector has: packed weights are laid out for it."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise ConfigError(f"the compiled operators cannot be loaded: {error}") from error
        for name in ("job_bytes", "step_bytes", "lanes", "use"):
            getattr(self._library, f"headrace_{name}").restype = ctypes.c_int64
        self._library.headrace_instruction_set.restype = ctypes.c_char_p
        self._run = self._library.headrace_run
        self._run.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
        self._run.restype = None
        sizes = (self._library.headrace_job_bytes(), self._library.headrace_step_bytes())
        if sizes != (ctypes.sizeof(Job), ctypes.sizeof(Step)):
            raise ConfigError(f"the compiled operators {path} are of another version")

    @property
    def instruction_set(self) -> str:
        name: bytes = self._library.headrace_instruction_set()
        return name.decode()

    @property
    def operators(self) -> str:
        """How an engine on these operators is described: results may differ between instruction sets."""
        return f"cpp_{self.instruction_set}"

    @property
    def lanes(self) -> int:
        return int(self._library.headrace_lanes())

    def use(self, instruction_set: str) -> bool:
        """Run on another instruction set from now on; return whether this processor has it. Weights packed for one
        are not for another."""
        return bool(self._library.headrace_use(instruction_set.encode()))

    def run(self, jobs: ctypes.Array[Job], step: Step, threads: int) -> None:
        """Run the jobs in order, each over all tokens of the step. Callers take turns; the interpreter goes on."""
        if step.tokens:
            self._run(jobs, len(jobs), ctypes.byref(step), threads)


_lock = threading.Lock()
_loaded: Library | ConfigError | None = None


def load_library() -> Library:
    """Return the process's library; it is compiled first where nobody has done so. Raises ConfigError, each time the
    same."""
    global _loaded
    with _lock:
        if _loaded is None:
            try:
                _loaded = Library(find())
            except ConfigError as error:
                _loaded = error
    if isinstance(_loaded, ConfigError):
        raise _loaded
    return _loaded


def library_or_none() -> Library | None:
    """As load_library, for those who have another way: it tells once in the log why there is none."""
    first = _loaded is None
    try:
        return load_library()
    except ConfigError as error:
        if first:
            log.warning("running on torch's operators, which are slower: %s", error)
        return None
