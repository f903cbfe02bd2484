"""A process with all that it has started: its end, and how long to wait for that."""

from __future__ import annotations

import asyncio

import psutil

EXIT_TIMEOUT_S = 60


def kill_family(process: psutil.Process) -> None:
    """End it and its descendants, if they still run."""
    try:
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=10)


async def exit_code_of(process: psutil.Popen) -> int:
    """Wait for its end."""
    code: int = await asyncio.get_running_loop().run_in_executor(None, process.wait, EXIT_TIMEOUT_S)
    return code
