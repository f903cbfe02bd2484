"""Run a module as the main program of a child process that never outlives its parent, however the parent ends."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_INTERVAL_S = 0.5


def die_with_parent(parent_pid: int) -> None:
    """Have this process killed when the thread that started it ends. Exits if that has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent_pid,), daemon=True).start()
    # The parent may have died before the request was made: then nobody will send the signal.
    if os.getppid() != parent_pid:
        os._exit(1)


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_POLL_INTERVAL_S)
    os._exit(1)


def child_command(module: str) -> list[str]:
    """Return the command line that runs `module` as a child of this process.

    Not `python -m`, which would look for our packages in the working directory first.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    code = "import sys; sys.path.append(sys.argv.pop(1)); from server.parent_watch import main; main()"
    return [sys.executable, "-P", "-c", code, root, str(os.getpid()), module]


def main() -> None:
    parent_pid, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent_pid)
    sys.argv[:] = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
