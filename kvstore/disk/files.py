"""Objects as files: written under a temporary name and read whole, past the page cache where the disk allows it.

Direct I/O wants memory, offsets and sizes in whole pages. What is not aligned goes through a thread's own aligned
buffer, and a file is cut to its length after its last page was written.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Sequence

import numpy as np

from kvstore.disk.place import FILE_MODE, Place, physical_bytes
from kvstore.errors import CorruptObjectError

PAGE_BYTES = 4096
REUSE_MARK_S = 600.0
"""An object's time of modification is when it was last used, give or take this: eviction after a restart goes by it."""

_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe of somebody's must not hang


class Scratch:
    """A thread's page-aligned buffer, as large as the largest object so far."""

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, PAGE_BYTES))

    def take(self, size_bytes: int) -> memoryview:
        """Return at least so many bytes, in whole pages; they hold anything."""
        pages = padded(size_bytes)
        if self._memory.nbytes < pages:
            self._memory = memoryview(mmap.mmap(-1, pages))
        return self._memory[:pages]


class ObjectFiles:
    """`direct` tells whether the page cache is passed by. `sync` waits until data is on the disk before an object can
    be found: without it a power failure leaves files whose checksums are wrong, which are misses."""

    def __init__(self, place: Place, *, direct: bool, sync: bool = False) -> None:
        self.direct, self._sync = direct, sync
        self._place = place

    def write(self, path: str, parts: Sequence[memoryview], scratch: Scratch) -> int:
        """Create the file `path` with all of its bytes; return what it takes physically. Raises OSError, and then the
        file may be there in part."""
        size = sum(part.nbytes for part in parts)
        fd = os.open(path, _WRITE | (os.O_DIRECT if self.direct else 0), FILE_MODE)
        try:
            if self.direct:
                _write_all(fd, _aligned(parts, size, scratch), PAGE_BYTES)
                if size % PAGE_BYTES:
                    os.ftruncate(fd, size)
            else:
                _write_all(fd, _joined(parts, size, scratch))
            if self._sync:
                os.fdatasync(fd)
            return physical_bytes(os.fstat(fd))
        finally:
            os.close(fd)

    def read(self, path: str, target: memoryview, scratch: Scratch, now_s: float) -> None:
        """Fill `target` with the file. Raises OSError, and CorruptObjectError when it has another length or is none."""
        try:
            fd = os.open(path, _READ | (os.O_DIRECT if self.direct else 0))
        except OSError as error:
            if _is_no_file(path):  # the disk is well: it must not be left alone because of this
                raise CorruptObjectError("magic", "not a file") from error
            raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise CorruptObjectError("magic", "not a file")
            if status.st_size != target.nbytes:
                raise CorruptObjectError("short", f"a file of {status.st_size} bytes instead of {target.nbytes}")
            read = _read_direct(fd, target, scratch) if self.direct else _read_all(fd, [target], target.nbytes)
            if read != target.nbytes:
                raise CorruptObjectError("short", f"{read} of {target.nbytes} bytes")
            if now_s - status.st_mtime > REUSE_MARK_S:
                self._mark(fd, now_s)
            if not self.direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def publish(self, temporary: str, path: str) -> None:
        """Give a whole file its name. Raises OSError."""
        try:
            os.rename(temporary, path)
        except FileNotFoundError:
            self._place.make_parents(path)
            os.rename(temporary, path)

    def _mark(self, fd: int, now_s: float) -> None:
        try:
            os.utime(fd, (now_s, now_s))
        except OSError:
            return  # read-only: the order after a restart is all that it would be good for


def takes_direct(place: Place) -> bool:
    """Write and read a page past the cache: whether the file system can. Raises OSError when it takes no files."""
    path = place.temporary()
    scratch = Scratch()
    page = scratch.take(PAGE_BYTES)
    page[:] = os.urandom(8) * (PAGE_BYTES // 8)
    content = bytes(page)
    try:
        try:
            ObjectFiles(place, direct=True).write(path, [page], scratch)
            page[:] = bytes(PAGE_BYTES)
            fd = os.open(path, _READ | os.O_DIRECT)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return False
            raise
        try:
            return os.preadv(fd, [page], 0) == PAGE_BYTES and bytes(page) == content
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        finally:
            os.close(fd)
    finally:
        unlink(path)


def _is_no_file(path: str) -> bool:
    """Whether something else than a file has the name."""
    try:
        return not stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def unlink(path: str) -> None:
    """Delete a file, if it is there. Raises OSError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def padded(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _is_aligned(view: memoryview) -> bool:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address % PAGE_BYTES == 0


def _aligned(parts: Sequence[memoryview], size: int, scratch: Scratch) -> memoryview:
    """Return aligned memory that begins with `parts` and is zero behind them, up to a whole page."""
    if len(parts) == 1 and size % PAGE_BYTES == 0 and size and _is_aligned(parts[0]):
        return parts[0]
    joined = _joined(parts, size, scratch, always_copy=True)
    whole = scratch.take(size)
    whole[size:] = bytes(whole.nbytes - size)
    assert joined.nbytes == size
    return whole


def _joined(parts: Sequence[memoryview], size: int, scratch: Scratch, *, always_copy: bool = False) -> memoryview:
    """Return `parts` in one piece, copied into the scratch buffer unless it is one already."""
    if len(parts) == 1 and not always_copy:
        return parts[0]
    whole, at = np.frombuffer(scratch.take(size), np.uint8), 0
    for part in parts:
        whole[at : at + part.nbytes] = np.frombuffer(part, np.uint8)
        at += part.nbytes
    return scratch.take(size)[:size]


def _write_all(fd: int, data: memoryview, step: int = 1) -> None:
    """Write all of it; after a short write go on from the last multiple of `step`. Raises OSError."""
    at = 0
    while at < data.nbytes:
        done = at + os.pwrite(fd, data[at:], at)
        following = done if done == data.nbytes else done // step * step
        if following == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        at = following


def _read_direct(fd: int, target: memoryview, scratch: Scratch) -> int:
    """Read into aligned memory: into the target itself but for its last part of a page, or else by way of scratch."""
    size = target.nbytes
    if not _is_aligned(target):
        whole = scratch.take(size)
        read = min(_read_all(fd, [whole], size), size)
        np.copyto(np.frombuffer(target, np.uint8)[:read], np.frombuffer(whole, np.uint8)[:read])
        return read
    pages, tail = size // PAGE_BYTES * PAGE_BYTES, size % PAGE_BYTES
    if not tail:
        return _read_all(fd, [target], size)
    last = scratch.take(PAGE_BYTES)
    read = min(_read_all(fd, [target[:pages], last], size), size)
    target[pages:] = last[:tail]
    return read


def _read_all(fd: int, buffers: Sequence[memoryview], size: int) -> int:
    """Read `size` bytes from the start into buffers that are at least so large; go on after short reads. Return how
    many there were."""
    at = 0
    while at < size:
        rest, skip = [], at
        for buffer in buffers:
            if skip < buffer.nbytes:
                rest.append(buffer[skip:])
            skip = max(0, skip - buffer.nbytes)
        read = os.preadv(fd, [buffer for buffer in rest if buffer.nbytes], at)
        if read == 0:
            break
        at += read
    return at
