"""Checks of the KV store's tiers for `headrace doctor`: each is looked at as a server would open it. Directories that
are not there are not made."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from kvstore.errors import TierUnusableError
from kvstore.manager.config import DirectorySpec, StoreConfig, parse_store
from server.doctor_check import Check

SECRET_HINT = (
    "A server that cannot keep its secret draws another one at each start: what it has stored for tenants (API keys,"
    " cache salts) is then not found again."
)


def store_checks(specs: Sequence[str], secret_file: str | None, *, keeps_secret: bool) -> Iterator[Check]:
    """Check the tiers that `--kv-store` would be given. `keeps_secret` tells whether the state directory can be written
    to, or has the scope secret already."""
    try:
        config = parse_store(specs)
    except ValueError as error:
        yield Check("kv store", "bad", str(error))
        return
    if config is None:
        return
    yield _memory(config)
    encrypted = "encrypted" if secret_file is not None else "not encrypted"
    for kind, directory in (("disk", config.disk), ("shared", config.shared)):
        if directory is not None:
            yield _directory(kind, directory, encrypted)
    if config.server is not None:
        yield _server(config.server, encrypted)
    if secret_file is not None:
        yield _encryption(Path(secret_file))
    if not keeps_secret and (config.disk or config.shared or config.server):
        yield Check("kv scope", "note", "the state directory cannot be written to", SECRET_HINT)


def _memory(config: StoreConfig) -> Check:
    page, size = os.sysconf("SC_PAGE_SIZE"), config.ram_bytes
    total = page * os.sysconf("SC_PHYS_PAGES")
    text = f"{size / 2**30:.1f} GiB for each engine"
    if size > total // 2:
        hint = f"That is more than half of this machine's {total / 2**30:.1f} GiB."
        return Check("kv ram", "note", text, hint)
    return Check("kv ram", "good", text)


def _directory(kind: str, spec: DirectorySpec, encrypted: str) -> Check:
    name, root = f"kv {kind}", Path(spec.path)
    nearest = root
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return Check(name, "bad", f"{root} cannot be written to", "Give it to the user that the server runs as.")
    try:
        free, direct = os.statvfs(nearest).f_bavail * os.statvfs(nearest).f_frsize, _takes_direct(nearest)
    except OSError as error:
        return Check(name, "bad", f"{root}: {error.strerror}")
    how = "O_DIRECT works" if direct else "no O_DIRECT: through the page cache"
    text = f"{root}, {spec.capacity_bytes / 2**30:.1f} GiB, {how}, {encrypted}"
    if free < min(spec.capacity_bytes, spec.min_free_bytes):
        return Check(name, "note", text, f"Only {free / 2**30:.1f} GiB are free there.")
    return Check(name, "good", text)


def _takes_direct(directory: Path) -> bool:
    """Whether a file there can be opened past the page cache. Raises OSError where none can be made at all."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".headrace-doctor-") as file:
        try:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            return False
    return True


def _server(url: str, encrypted: str) -> Check:
    from kvstore.remote.tier import RemoteTier
    from kvstore.tier import Deadline

    try:
        tier = RemoteTier(url, readers=1, writers=1, meeting_s=2.0)
    except (TierUnusableError, ValueError) as error:
        return Check("kv server", "bad", str(error))
    try:
        if tier.refusal:
            hint = "A server starts without it, and looks for it every second."
            return Check("kv server", "note", f"{tier.address} does not answer: {tier.refusal}", hint)
        return Check("kv server", "good", f"{tier.address} answers, {encrypted}")
    finally:
        tier.close(Deadline.after(1.0))


def _encryption(secret_file: Path) -> Check:
    if find_spec("cryptography") is None:
        return Check("kv secret", "bad", "encryption is not installed", "pip install 'headrace[encryption]'")
    from kvstore.encryption import read_secret

    try:
        read_secret(secret_file)
    except TierUnusableError as error:
        return Check("kv secret", "bad", str(error))
    return Check("kv secret", "good", str(secret_file))
