"""Engine processes whose loop can be held by a signal while other threads go on, ZeroMQ's above all.

SIGUSR1 holds the main thread, SIGWINCH has it compute as in a long step, SIGUSR2 lets it go. `python -m
tests.support.holdable` is the real engine with it.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

from server.core_process import load_engine, read_spec, run

HOLD, COMPUTE, LET_GO = signal.SIGUSR1, signal.SIGWINCH, signal.SIGUSR2


def hold_on_signal() -> None:
    """Call it before there are other threads: they inherit that the second signal is for the main thread alone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {LET_GO})
    signal.signal(HOLD, _hold)
    signal.signal(COMPUTE, _compute)


def _hold(_signal: int, _frame: FrameType | None) -> None:
    signal.sigwait({LET_GO})


def _compute(_signal: int, _frame: FrameType | None) -> None:
    while LET_GO not in signal.sigpending():
        sum(range(10_000))
    signal.sigwait({LET_GO})


if __name__ == "__main__":
    hold_on_signal()
    sys.exit(run(read_spec(sys.argv[1:]), load_engine))
