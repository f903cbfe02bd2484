"""Compiles the operators with the system's C++ compiler, once for each version of sources, flags and compiler.

Finished libraries lie in a folder of the user's own, named by a digest. They appear there whole, by a rename: processes
that start at the same time compile twice at worst. `headrace build-ops` does it ahead, also into the installation
itself, for images whose file system cannot be written to.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError
from engine.loader.packaged import default_cache_dir

SOURCES = Path(__file__).parent / "src"
SHIPPED = Path(__file__).parent / "built"
"""Where an installation carries its own libraries, if it was told to."""

COMPILERS = ("c++", "g++", "clang++")
COMPILE_TIMEOUT_S = 300

# No -march=native: the library may be built ahead on another machine, and chooses among its parts when it is loaded.
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-fno-math-errno", "-w")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma")
_INSTRUCTION_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx512vnni": (*_AVX512, "-mavx512vnni"),
        "avx512": _AVX512,
        "avx2": ("-mavx2", "-mfma"),
    }
}
"""By machine, best first, with what the compiler has to be told. "generic" is for all."""

_CPU_FLAGS = {
    "avx512vnni": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx2": {"avx2", "fma"},
}
"""What /proc/cpuinfo says of a processor that has the set."""


@dataclass(frozen=True, slots=True)
class Compiler:
    path: str
    version: str


def find_compiler() -> Compiler:
    """Return the compiler that CXX names, or the first of the usual ones. Raises ConfigError."""
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return Compiler(path, _run([path, "--version"]))
    raise ConfigError(
        f"no C++ compiler was found ({chosen or ', '.join(COMPILERS)})",
        hint="Install one (Debian and Ubuntu: apt-get install g++), or run `headrace build-ops` where there is one.",
    )


def build(*, for_any_processor: bool = True, into_installation: bool = False) -> Path:
    """Return the library, compiled unless it is there already. Raises ConfigError with one line for the user.

    One that is not `for_any_processor` has the best instruction set of this one, and takes a third of the time.
    """
    compiler = find_compiler()
    folder = SHIPPED if into_installation else _cache_folder()
    sets = _sets(for_any_processor)
    target = folder / _file_name(compiler, sets)
    if not target.is_file():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as work:
                made = _compile(compiler, {"generic": (), **sets}, Path(work))
                os.replace(made, target)
        except OSError as error:
            raise ConfigError(f"the operators cannot be built in {folder}: {error}") from error
    return target


def find() -> Path:
    """Return the library to load: the installation's own, one compiled before, or one compiled now.

    Without a compiler one that another made of the same sources will do. Raises ConfigError.
    """
    pattern = f"operators-{_source_digest()}-*.so"
    if shipped := sorted(SHIPPED.glob(pattern)):
        return shipped[0]
    try:
        ahead = _cache_folder() / _file_name(find_compiler(), _sets(for_any_processor=True))
        return ahead if ahead.is_file() else build(for_any_processor=False)
    except ConfigError:
        if kept := sorted(_cache_folder().glob(pattern)):
            return kept[0]
        raise


def _sets(for_any_processor: bool) -> dict[str, tuple[str, ...]]:
    """Return the instruction sets beside "generic", with their flags."""
    sets = _INSTRUCTION_SETS.get(platform.machine(), {})
    return sets if for_any_processor else {name: sets[name] for name in _best_of(sets)}


def _best_of(sets: Iterable[str]) -> list[str]:
    """Return the first of the sets that this processor has; all of them where that is not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return list(sets)
    flags = next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())
    return [name for name in sets if _CPU_FLAGS[name] <= flags][:1]


def _cache_folder() -> Path:
    """What is loaded from here runs in the engine: nobody else may be able to write to it."""
    folder = default_cache_dir() / "operators"
    if folder.exists():
        found = folder.stat()
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise ConfigError(f"{folder} can be written to by others", hint=f"Delete it, or run: chmod 700 {folder}")
    return folder


def _file_name(compiler: Compiler, sets: Iterable[str]) -> str:
    made_by = hashlib.sha256(f"{compiler.path}\0{compiler.version}".encode()).hexdigest()[:16]
    return f"operators-{_source_digest()}-{made_by}-{'-'.join(('generic', *sets))}.so"


def _source_digest() -> str:
    """Over sources, flags and the kind of processor."""
    digest = hashlib.sha256(repr((platform.system(), platform.machine(), _FLAGS, _INSTRUCTION_SETS)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: Compiler, sets: dict[str, tuple[str, ...]], work: Path) -> Path:
    """Compile the parts, as many at a time as there are cores, and return the linked library."""
    parts: dict[str, tuple[str, tuple[str, ...]]] = {"team": ("team.cpp", ()), "run": ("run.cpp", ())}
    for name, flags in sets.items():
        parts[f"operators_{name}"] = ("operators.cpp", (f"-DINSTRUCTION_SET={name}", *flags))

    def compile_part(part: tuple[str, tuple[str, tuple[str, ...]]]) -> str:
        name, (source, flags) = part
        target = str(work / f"{name}.o")
        _run([compiler.path, *_FLAGS, *flags, "-c", str(SOURCES / source), "-o", target])
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_part, parts.items()))
    target = work / "operators.so"
    _run([compiler.path, "-shared", "-pthread", *objects, "-o", str(target)])
    return target


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"the C++ compiler {command[0]} does not work: {error}") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        told = next((line for line in lines if "error" in line), lines[-1] if lines else f"exit code {done.returncode}")
        raise ConfigError(f"the C++ compiler {command[0]} failed: {told.strip()}")
    return done.stdout
