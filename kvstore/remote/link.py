"""One connection to a Redis or Valkey server: commands out, replies in, each within a deadline and a bound.

Replies are RESP2, read by the little parser here. Two things ask for one of our own: bytes go from the socket straight
into the memory of who wanted them, and a deadline is for a whole reply, however slowly it comes. A server may say
anything: no length it claims is believed before it is compared with what is allowed.

Plain sockets block with the kernel's own time-outs (SO_RCVTIMEO, SO_SNDTIMEO), so that a MiB is one call and not one
for each packet. TLS has its records read one by one.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Sequence
from itertools import islice
from typing import TypeAlias

from kvstore.tier import Deadline

BUFFER_BYTES = 16 << 10
"""What is read ahead for the sake of headers; of a payload it is the part that is copied."""

STALL_S = 1.0
"""A server that has not taken or sent a byte for so long is not waited for, however late the deadline is."""

MAX_SKIPPED_BYTES = 1 << 20
"""A string that nobody wants is read up to this size; the connection goes with a longer one."""

MAX_DEPTH = 4
MAX_PIECES = 512
"""Pieces of memory in one call; the kernel allows 1024."""

Value: TypeAlias = "bytes | int | list[Value] | None"
Argument: TypeAlias = bytes | memoryview


class LinkBrokenError(Exception):
    """The connection ended, or what came was no reply: it cannot be used any more."""


class LinkSlowError(LinkBrokenError):
    """The deadline came, or the server stood still, in the middle of something."""


class ErrorReplyError(Exception):
    """The server answered with an error; the connection is in order. The text is the server's, cut short."""

    def __init__(self, text: bytes) -> None:
        super().__init__(text[:200].decode(errors="replace"))

    @property
    def code(self) -> str:
        """Its first word, as in OOM or NOSCRIPT."""
        return str(self).partition(" ")[0]


class Link:
    """For one thread at a time; `abort` alone may be called from another one. After LinkBrokenError only `close` is
    left to do."""

    def __init__(self, sock: socket.socket, stall_s: float = STALL_S) -> None:
        self._sock, self._stall_s = sock, stall_s
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._stop = 0
        # The kernel's time-outs as they are set, in microseconds.
        self._allowed: dict[int, int] = {}
        self.received_bytes = 0
        self.is_spent = False
        """In the middle of a string that is not worth reading: there is nothing left to do but to close it."""
        if not self._is_tls:
            sock.settimeout(None)

    def close(self) -> None:
        self._sock.close()

    def abort(self) -> None:
        """Make whoever waits for the server wait no longer."""
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:
            return  # it has gone already

    # Out

    def send(self, pieces: Sequence[Argument], deadline: Deadline) -> None:
        """Write all of it. Raises LinkBrokenError."""
        views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        at, skip = 0, 0
        while at < len(views):
            batch = [views[at][skip:], *islice(views, at + 1, at + MAX_PIECES)]
            skip += self._send_some(batch, deadline)
            while at < len(views) and skip >= views[at].nbytes:
                skip -= views[at].nbytes
                at += 1

    def _send_some(self, batch: Sequence[memoryview], deadline: Deadline) -> int:
        try:
            self._allow(socket.SO_SNDTIMEO, deadline)
            return self._sock.send(batch[0]) if self._is_tls else self._sock.sendmsg(batch)
        except (BlockingIOError, TimeoutError):
            raise LinkSlowError("the server takes nothing") from None
        except (OSError, ValueError) as error:
            raise LinkBrokenError(_why(error)) from None

    # In

    def call(self, *arguments: bytes, deadline: Deadline, max_bytes: int) -> Value:
        """Ask for something whose reply is of at most `max_bytes`. Raises LinkBrokenError and ErrorReplyError."""
        self.send([command(*arguments)], deadline)
        return self.reply(deadline, max_bytes)

    def reply(self, deadline: Deadline, max_bytes: int) -> Value:
        value, _ = self._reply(deadline, max_bytes, 0)
        return value

    def bulk_size(self, deadline: Deadline) -> int | None:
        """Return how many bytes of a string follow, None when there is none. `read_into` or `skip` is next."""
        line = self._line(deadline)
        if line[:1] == b"-":
            raise ErrorReplyError(line[1:])
        if line[:1] != b"$":
            raise LinkBrokenError(f"a reply of another kind: {line[:20]!r}")
        size = _number(line[1:])
        return None if size < 0 else size

    def read_into(self, target: memoryview, deadline: Deadline) -> None:
        """Fill `target` with a string that was announced with its size."""
        self.read_part(target, deadline)
        self.end_string(deadline)

    def read_part(self, target: memoryview, deadline: Deadline) -> None:
        """Fill `target` with the next bytes of a string; `end_string` follows behind its last one."""
        buffered = min(self._stop - self._start, target.nbytes)
        target[:buffered] = self._view[self._start : self._start + buffered]
        self._start += buffered
        at = buffered
        while at < target.nbytes:
            at += self._receive(target[at:], deadline, whole=True)

    def skip(self, size: int, deadline: Deadline) -> None:
        """Pass over a string that was announced with its size, or leave it and be spent."""
        if size > MAX_SKIPPED_BYTES:
            self.is_spent = True
            return
        while size > self._stop - self._start:
            size -= self._stop - self._start
            self._start = self._stop = 0
            self._stop = self._receive(self._view, deadline)
        self._start += size
        self.end_string(deadline)

    def end_string(self, deadline: Deadline) -> None:
        """Pass over what is behind a string."""
        while self._stop - self._start < 2:
            self._more(deadline)
        if self._buffer[self._start : self._start + 2] != b"\r\n":
            raise LinkBrokenError("a string without its end")
        self._start += 2

    def _reply(self, deadline: Deadline, budget: int, depth: int) -> tuple[Value, int]:
        """Return a reply and what is left of the budget. An error within an array breaks the link: none is expected."""
        line = self._line(deadline)
        budget -= len(line) + 2
        if budget < 0:
            raise LinkBrokenError("a reply that is too long")
        kind, rest = line[:1], line[1:]
        if kind == b"-" and not depth:
            raise ErrorReplyError(rest)
        if kind == b"+":
            return rest, budget
        if kind not in (b":", b"$", b"*"):
            raise LinkBrokenError(f"no reply: {line[:20]!r}")
        number = _number(rest)
        if kind == b":" or number < 0:
            return (number if kind == b":" else None), budget
        if number > budget or depth == MAX_DEPTH:
            raise LinkBrokenError(f"a reply of {number} bytes or more")
        if kind == b"$":
            data = bytearray(number)
            self.read_into(memoryview(data), deadline)
            return bytes(data), budget - number
        values = []
        for _ in range(number):
            value, budget = self._reply(deadline, budget, depth + 1)
            values.append(value)
        return values, budget

    def _line(self, deadline: Deadline) -> bytes:
        """Return what comes before the next end of a line, which is within the buffer's size."""
        searched = self._start
        while (end := self._buffer.find(b"\r\n", searched, self._stop)) < 0:
            unsearched = max(0, self._stop - self._start - 1)
            self._more(deadline)
            searched = self._start + unsearched
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line

    def _more(self, deadline: Deadline) -> None:
        """Add to the buffer, at its front if there is no room behind."""
        if self._start == self._stop:
            self._start = self._stop = 0
        elif self._stop == BUFFER_BYTES:
            if not self._start:
                raise LinkBrokenError("a line without an end")
            self._buffer[: self._stop - self._start] = self._buffer[self._start : self._stop]
            self._start, self._stop = 0, self._stop - self._start
        self._stop += self._receive(self._view[self._stop :], deadline)

    def _receive(self, view: memoryview, deadline: Deadline, *, whole: bool = False) -> int:
        """Receive at least one byte; `whole` waits for all of them while they keep coming."""
        try:
            self._allow(socket.SO_RCVTIMEO, deadline)
            flags = socket.MSG_WAITALL if whole and not self._is_tls else 0
            count = self._sock.recv_into(view, view.nbytes, flags)
        except (BlockingIOError, TimeoutError):
            raise LinkSlowError("the server says nothing") from None
        except (OSError, ValueError) as error:
            raise LinkBrokenError(_why(error)) from None
        if not count:
            raise LinkBrokenError("the server closed the connection")
        self.received_bytes += count
        return count

    def _allow(self, which: int, deadline: Deadline) -> None:
        """Let the next call take until the deadline, or until nothing has moved for a while."""
        seconds = min(deadline.left_s, self._stall_s)
        if seconds <= 0:
            raise LinkSlowError("not within the deadline")
        if self._is_tls:
            self._sock.settimeout(seconds)
        else:
            micros = int(seconds * 1e6) + 1
            if micros != self._allowed.get(which):
                self._allowed[which] = micros
                self._sock.setsockopt(socket.SOL_SOCKET, which, struct.pack("ll", *divmod(micros, 1_000_000)))


def command(*arguments: bytes) -> bytes:
    """Return a command as it is sent."""
    return b"*%d\r\n" % len(arguments) + b"".join([b"$%d\r\n%b\r\n" % (len(one), one) for one in arguments])


def _number(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > 18:
        raise LinkBrokenError(f"no number: {text[:20]!r}")
    return int(text)


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
