"""One block of host memory that other processes can map, in which objects lie.

It is a memfd: it has no name, so it is gone with the last process that maps it, however that ends. Others get at it by
its descriptor (inherited, sent over a Unix socket, or /proc/PID/fd/N for the same user). It is sealed: nobody can
shrink it under a reader, and nobody but its owner can map it for writing.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from kvstore.errors import TierUnusableError

_SEAL_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE (Linux 5.1), which Python has no name for."""


class Arena:
    """`capacity_bytes` of memory, rounded up to pages; pages that were never written take no memory."""

    def __init__(self, capacity_bytes: int, name: str = "headrace-kv") -> None:
        self.capacity_bytes = -(-capacity_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.capacity_bytes)
            self._map = mmap.mmap(self.fd, self.capacity_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise TierUnusableError(f"no {capacity_bytes} bytes of shared memory: {error}") from error
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _SEAL_FUTURE_WRITE
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self._all = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        """Where it lies in this process."""

    @property
    def path(self) -> str:
        """Where processes of the same user find it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def view(self, offset: int, size_bytes: int) -> memoryview:
        return self._all[offset : offset + size_bytes]

    def close(self) -> None:
        """Give up the descriptor and this object's own use of the memory; views that are still out keep it alive."""
        os.close(self.fd)
        del self._all, self._map


def map_arena(fd: int) -> memoryview:
    """Return an arena of another process as read-only memory, given a descriptor of it, which may be closed then."""
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ))
