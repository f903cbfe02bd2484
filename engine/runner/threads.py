"""How the CPU's worker threads wait. Has to be settled before torch is imported, so this file must not import it."""

from __future__ import annotations

from collections.abc import MutableMapping

SPIN_COUNT = "1000"
"""A few microseconds. libgomp's own default spins for milliseconds: beside any other busy process, threads that wait
take the core from the one that works, and a matrix product of 0.3 ms was measured at 24 ms."""


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Set libgomp's spin count unless the user has chosen how threads wait.

    Call with `os.environ` before anything imports torch, or with the environment of a process to be started.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
