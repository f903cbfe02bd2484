"""Where things lie below a disk tier's root. All names are ours or hex digits.

lock                                       held by the process that counts and evicts
objects/NAMESPACE/namespace.json           for people
objects/NAMESPACE/OWNER/XX/LEAF.kvb        an object; XX are the first two digits of LEAF
incoming/                                  objects that are being written, renamed when they are whole
doomed/                                    whole directories that are to be deleted
corrupt/                                   the last few objects that were not what they should have been
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvstore.errors import TierUnusableError
from kvstore.namespace import Namespace
from kvstore.object_key import ObjectKey

log = logging.getLogger(__name__)

SUFFIX = ".kvb"
NAMESPACE_FILE = "namespace.json"
DIR_MODE = 0o700
FILE_MODE = 0o600
KEPT_CORRUPT = 8
"""So many corrupt objects are kept for whoever wants to know what happened to them."""

BLOCK_BYTES = 512
"""The unit of st_blocks, whatever the file system's own is."""


@dataclass(frozen=True, slots=True)
class FoundObject:
    """An object's file as a walk found it: sizes in bytes, `size_bytes` is what it takes physically."""

    key: ObjectKey
    size_bytes: int
    length: int
    modified_s: float


class Place:
    """Paths below a root, and the few things that are done with whole directories."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.objects, self.incoming = root / "objects", root / "incoming"
        self.doomed, self.corrupt = root / "doomed", root / "corrupt"
        self.lock = root / "lock"
        self._setting_aside = threading.Lock()

    def create(self) -> None:
        """Make the directories. Raises TierUnusableError."""
        try:
            self.root.mkdir(DIR_MODE, parents=True, exist_ok=True)
            self.restore()
        except OSError as error:
            raise TierUnusableError(f"{self.root}: {error.strerror}") from error

    def restore(self) -> None:
        """Make those that are missing. A root that has gone is not made again where it was in a directory that has gone
        too. Raises OSError."""
        for path in (self.root, self.objects, self.incoming, self.doomed, self.corrupt):
            path.mkdir(DIR_MODE, exist_ok=True)

    def path_of(self, key: ObjectKey) -> str:
        leaf = key.leaf
        return f"{self.objects}/{key.namespace.hex()}/{key.owner.hex()}/{leaf[:2]}/{leaf}{SUFFIX}"

    def temporary(self) -> str:
        """Return a path that nobody else uses, on this machine or another."""
        return f"{self.incoming}/{os.getpid()}-{secrets.token_hex(12)}"

    def make_parents(self, path: str) -> None:
        """Make an object's directories, one by one: each is ours alone to read."""
        missing = []
        parent = os.path.dirname(path)
        while not os.path.isdir(parent):
            missing.append(parent)
            parent = os.path.dirname(parent)
        for one in reversed(missing):
            try:
                os.mkdir(one, DIR_MODE)
            except FileExistsError:
                continue  # another thread or process was faster

    def walk(self) -> Iterator[FoundObject]:
        """Yield all objects, in no order. Whatever is not ours is passed by; what goes meanwhile is left out. Raises
        OSError for a directory that cannot be read."""
        for directory in self._directories():
            for entry in _scan(directory):
                if not entry.name.endswith(SUFFIX) or not entry.is_file(follow_symlinks=False):
                    continue
                try:
                    key = key_of_path(entry.path)
                    status = entry.stat(follow_symlinks=False)
                except (ValueError, FileNotFoundError):
                    continue
                yield FoundObject(key, physical_bytes(status), status.st_size, status.st_mtime)

    def _directories(self) -> Iterator[str]:
        paths = [str(self.objects)]
        for _ in range(3):
            paths = [entry.path for path in paths for entry in _scan(path) if entry.is_dir(follow_symlinks=False)]
        yield from paths

    def doom(self, namespace: bytes | None, owner: bytes | None) -> None:
        """Move the directories of a namespace, an owner, both together or (neither) all out of reach, at once."""
        namespaces = [entry for entry in _scan(str(self.objects)) if namespace is None or entry.name == namespace.hex()]
        paths = [entry.path for entry in namespaces]
        if owner is not None:
            paths = [f"{path}/{owner.hex()}" for path in paths]
        for path in paths:
            try:
                os.rename(path, f"{self.doomed}/{secrets.token_hex(12)}")
            except FileNotFoundError:
                continue  # there is nothing of this owner in this namespace

    def set_aside(self, path: str) -> None:
        """Take a corrupt object out of the way. What cannot be moved is logged: it will be found corrupt again."""
        with self._setting_aside:
            try:
                if not self._keep(path):
                    self.remove(path)
            except FileNotFoundError:
                return
            except OSError as error:
                log.warning("a corrupt object cannot be moved away: %s", error)

    def _keep(self, path: str) -> bool:
        """Move a corrupt object to those that are kept; return False where it is not, and is still in the way."""
        if not self.corrupt.is_dir() or len(_scan(str(self.corrupt))) >= KEPT_CORRUPT:
            return False
        os.rename(path, f"{self.corrupt}/{os.path.basename(path)}.{secrets.token_hex(4)}")
        return True

    def remove(self, path: str) -> None:
        """Delete a file, or a directory that somebody put in its place. Raises OSError."""
        if os.path.isdir(path) and not os.path.islink(path):
            os.rename(path, f"{self.doomed}/{secrets.token_hex(12)}")
        else:
            os.unlink(path)

    def clear_incoming(self, age_s: float) -> None:
        """Delete unfinished files of at least that age. Raises OSError."""
        now = time.time()
        for entry in _scan(str(self.incoming)):
            try:
                if now - entry.stat(follow_symlinks=False).st_mtime >= age_s:
                    os.unlink(entry.path)
            except FileNotFoundError:
                continue  # finished after all

    def clear_doomed(self, stop: Callable[[], bool]) -> None:
        """Delete whole directories, until `stop` says so. Raises OSError."""
        for entry in _scan(str(self.doomed)):
            for directory, _, _ in os.walk(entry.path, topdown=False):
                if stop():
                    return
                shutil.rmtree(directory)

    def describe(self, namespace: Namespace) -> None:
        """Leave a namespace's fields beside its objects, in plain text. Raises OSError."""
        path = f"{self.objects}/{namespace.digest.hex()}/{NAMESPACE_FILE}"
        temporary = self.temporary()
        self.make_parents(path)
        text = msgspec.json.format(msgspec.json.encode(msgspec.structs.asdict(namespace)))
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb") as file:
            file.write(text)
        os.rename(temporary, path)


def lock_exclusively(place: Place) -> int | None:
    """Return the descriptor that holds the directory's lock until it is closed, None when another one does. Raises
    OSError."""
    fd = os.open(place.lock, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd


def key_of_path(path: str) -> ObjectKey:
    """Return the key of an object's path. Raises ValueError for a path of anything else."""
    namespace, owner, fan, file = path.split("/")[-4:]
    leaf = file.removesuffix(SUFFIX)
    if file == leaf or not leaf.startswith(fan) or len(fan) != 2:
        raise ValueError("not the path of an object")
    return ObjectKey.parse(f"{namespace}/{owner}/{leaf}")


def physical_bytes(status: os.stat_result) -> int:
    """Return what a file takes. File systems that allocate late say 0 at first, so its length in pages is the least."""
    return max(status.st_blocks * BLOCK_BYTES, -(-status.st_size // 4096) * 4096)


def _scan(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
