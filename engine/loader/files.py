"""Opens and reads a model's files: regular ones only, up to a size that no such file has. Knows no formats.

A pipe would keep its reader waiting for ever, and a device would fill the memory.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_TEXT_BYTES = 96 * 1024 * 1024
"""Of configurations, tokenizers and templates. The largest tokenizers take 35 MB; parsed JSON may take twenty times as
much."""
MAX_CONFIG_BYTES = 16 * 1024 * 1024
"""Of JSON files that are no tokenizers. The largest are shards' indices."""


def open_regular(path: Path) -> BinaryIO:
    """Open for reading. Raises OSError, also for what is no regular file."""
    # Without O_NONBLOCK the call itself would wait for a pipe's writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, limit_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return all bytes of a file. Raises OSError, also for a larger one."""
    with open_regular(path) as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return data
