"""Checks of a machine for `headrace doctor`. Each looks at one thing and never raises; torch is asked in a process of
its own, because only the engine's process may load it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.errors import ConfigError
from engine.loader.packaged import default_cache_dir
from server.access.credentials import STATE_VARIABLE
from server.access.scope_secret import FILE_NAME, read_secret, state_dir
from server.doctor_check import Check
from server.doctor_kv import store_checks
from server.launcher import listen

MIN_PYTHON = (3, 11)
LOW_MEMORY_BYTES = 2 * 1024**3
LOW_FILES = 1024
TORCH_TIMEOUT_S = 60


def checks(host: str, port: int, kv_store: Sequence[str] = (), kv_secret_file: str | None = None) -> Iterator[Check]:
    """Check the machine, and the tiers that a KV store would be given."""
    yield _python()
    yield from _torch()
    yield _memory()
    yield _directory("model cache", default_cache_dir(), "HEADRACE_CACHE_DIR")
    state = state_dir(os.environ.get(STATE_VARIABLE))
    kept = _directory("state", state, STATE_VARIABLE)
    yield kept
    yield from _scope_secret(state)
    keeps_secret = kept.state == "good" or (state / FILE_NAME).exists()
    yield from store_checks(kv_store, kv_secret_file, keeps_secret=keeps_secret)
    yield _open_files()
    yield _port(host, port)


def _python() -> Check:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < MIN_PYTHON:
        return Check("python", "bad", text, "Headrace needs Python 3.11 or newer.")
    return Check("python", "good", text)


_ASK_TORCH = """
import json, sys, torch
sys.path.append(sys.argv[1])
from engine.attention.registry import choose
from engine.cpu_ops.library import load_library
from engine.errors import ConfigError
cuda = torch.cuda.is_available()
devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
try:
    operators, problem = choose(torch.device("cuda"), "default").name if cuda else load_library().operators, None
except ConfigError as error:
    operators, problem = "torch", str(error)
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices,
                  "operators": operators, "problem": problem,
                  "threads": torch.get_num_threads(), "isa": torch.backends.cpu.get_cpu_capability()}))
"""


def _torch() -> Iterator[Check]:
    root = str(Path(__file__).parents[1])
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH, root],
            capture_output=True,
            text=True,
            timeout=TORCH_TIMEOUT_S,
            check=True,
        )
        told = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or ["it cannot be imported"]
        yield Check("torch", "bad", last[0], "Install it with: pip install 'torch>=2.11,<2.15'")
        return
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        yield Check("torch", "bad", f"it cannot be asked: {type(error).__name__}")
        return
    build = f"CUDA {told['cuda']}" if told["cuda"] else "CPU"
    yield Check("torch", "good", f"{told['version']} ({build} build, {told['isa']})")
    if told["devices"]:
        yield Check("device", "good", ", ".join(told["devices"]))
    elif told["cuda"]:
        yield Check("device", "note", "cpu: this build of torch can use a GPU and finds none")
    else:
        yield Check("device", "good", "cpu")
    if told["problem"] is None:
        yield Check("operators", "good", told["operators"])
    else:
        yield Check(
            "operators", "note", f"{told['operators']}: {told['problem']}", "The CPU's own are several times faster."
        )
    yield Check("threads", "good", f"{told['threads']} of torch, {os.cpu_count()} cores")


def _memory() -> Check:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return Check("memory", "note", "it is not known how much is free")
    text = f"{free / 1024**3:.1f} GiB available of {total / 1024**3:.1f} GiB"
    if free < LOW_MEMORY_BYTES:
        return Check("memory", "note", text, "Only small models fit.")
    return Check("memory", "good", text)


def _directory(name: str, path: Path, variable: str) -> Check:
    """A directory that is there and can be written to, or can be made."""
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return Check(name, "note", f"{path} cannot be written to", f"Point {variable} at a directory of yours.")
    return Check(name, "good", str(path) if path.exists() else f"{path} (made when needed)")


def _scope_secret(directory: Path) -> Iterator[Check]:
    path = directory / FILE_NAME
    try:
        if path.exists():
            read_secret(path)
            yield Check("secret", "good", str(path))
    except (ConfigError, OSError) as error:
        yield Check("secret", "bad", str(error), getattr(error, "hint", None))


def _open_files() -> Check:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard}"
    if soft != resource.RLIM_INFINITY and soft <= LOW_FILES:
        hint = "Every connection takes one: raise it with `ulimit -n`."
        return Check("open files", "note", f"{soft} ({shown})", hint)
    return Check("open files", "good", f"{soft} ({shown})")


def _port(host: str, port: int) -> Check:
    try:
        listen(host, port).close()
    except ConfigError as error:
        return Check("port", "bad", str(error), error.hint)
    return Check("port", "good", f"{host} port {port} is free")
