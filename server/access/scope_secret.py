"""The secret from which cache scopes are made: one per installation, kept in a file that only its owner can read.

Without it nobody can compute another tenant's block keys. It outlives restarts, so that stored blocks stay usable, and
hosts that share a store share it. Several processes may start at once: all of them get the one secret.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from engine.errors import ConfigError

FILE_NAME = "scope-secret"
SECRET_BYTES = 32

_FORM = re.compile(rb"(?:[0-9a-f]{2}){32,}\s*", re.IGNORECASE)


def state_dir(chosen: str | None) -> Path:
    """The directory of what outlives a restart: HEADRACE_STATE_DIR, or the platform's for this user's data."""
    import platformdirs

    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_data_dir("headrace"))


def load_or_make(directory: Path) -> bytes:
    """Return the directory's secret, made now if there is none.

    Raises ConfigError when the file's permissions or content are wrong, and OSError when it cannot be made.
    """
    path = directory / FILE_NAME
    if not path.exists():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make(path)
    return read_secret(path)


def read_secret(path: Path) -> bytes:
    """Return the secret of a file. Raises ConfigError when others may read it or it holds no secret."""
    try:
        # Without blocking, so that a pipe in the file's place is refused below and not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"The scope secret {path} cannot be read: {error.strerror or error}.") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"The scope secret {path} is no file.")
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"The scope secret {path} is open to other users (mode {stat.S_IMODE(mode):04o}).",
                hint=f"Run: chmod 600 {path}",
            )
        content = os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
    if not _FORM.fullmatch(content):
        raise ConfigError(
            f"The scope secret {path} holds no secret: 64 or more hexadecimal digits are needed.",
            hint="Make one with: openssl rand -hex 32",
        )
    return bytes.fromhex(content.decode())


def _make(path: Path) -> None:
    """Write a new secret unless another process is faster. Nobody ever sees a file that is not whole."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_hex(SECRET_BYTES).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)  # unlike a rename it never replaces the secret of another process
        except FileExistsError:
            return
        _sync_directory(path.parent)
    finally:
        os.unlink(draft)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
