"""What makes a disk fail for one process alone: file systems of its own, and a library that is loaded before others."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NAMESPACED = ["unshare", "--user", "--map-root-user", "--mount"]
SOURCE = Path(__file__).with_name("faulty_io.c")


def can_mount() -> bool:
    """Whether this user may have a mount namespace, in which file systems can be mounted without touching others."""
    if shutil.which("unshare") is None:
        return False
    done = subprocess.run([*NAMESPACED, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False)
    return done.returncode == 0


def built_faulty_io(directory: Path) -> Path:
    """Return the library, or skip the test where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = directory / "faulty_io.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


# In the process whose disk fails


def mount(root: Path, *options: str) -> None:
    root.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(root)], check=True)


def remount(root: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(root)], check=True)


def fault(letter: str) -> None:
    """What the disk does from now on (tests/support/faulty_io.c)."""
    Path(os.environ["FAULTS"]).write_text(letter)
