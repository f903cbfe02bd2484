"""Wakes a loop that waits for messages, from any thread."""

from __future__ import annotations

import os
from contextlib import suppress


class Waker:
    """A file descriptor that can be read after `wake`, until `clear`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def wake(self) -> None:
        if not self._closed:
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with suppress(BlockingIOError):  # nobody has woken
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Nobody may be about to wake."""
        self._closed = True
        os.close(self.fd)
