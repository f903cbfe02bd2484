"""Objects over the wire: loads straight into the memory that wants them, saves straight out of their pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.codec import ObjectCodec
from kvstore.errors import CorruptObjectError
from kvstore.object_key import ObjectKey
from kvstore.remote.forgotten import Forgotten
from kvstore.remote.lanes import Pieces
from kvstore.remote.link import Argument, ErrorReplyError, Link, command
from kvstore.tier import Deadline, Outcome
from kvstore.work import Job

MAX_REPLY_BYTES = 4096
UNDER_WAY_BYTES = 3 << 19
"""What one connection has asked for and not received, beside a single larger object. A server makes the replies to all
that it is asked at once, and everybody else waits for it meanwhile: with 8 MiB on each of four connections a small
command took eight milliseconds, with this one or two, and loads are hardly slower."""

READ_BYTES = 256 << 10
"""What is received at once: little enough to be in the processor's caches when it is checked."""

SETTLE_S = 1.0
"""How long a save waits until the server has forgotten an earlier object of the same name."""

Condemn = Callable[[ObjectKey, CorruptObjectError], None]
"""Hears of an object that is not what it should be: it is to be deleted."""


@dataclass(frozen=True, slots=True)
class Piece:
    """An object's key and its memory: the target of a load, the parts of a save."""

    key: ObjectKey
    views: Sequence[memoryview]


class Loading:
    """Gets objects, each of which is kept for another `ttl_ms` from then on."""

    def __init__(self, forgotten: Forgotten, codec: ObjectCodec, ttl_ms: int, condemn: Condemn) -> None:
        self._forgotten, self._codec, self._condemn = forgotten, codec, condemn
        self._ttl_ms = b"%d" % ttl_ms

    def __call__(self, link: Link, pieces: Pieces[Piece], count: int) -> bool | None:
        waiting, asked = deque[tuple[Job[Piece], bytes]](), deque[Job[Piece]]()
        for job in pieces.first(count):
            name = self._forgotten.name(job.work.key)
            if name is None:
                pieces.end(job, Outcome("miss"))
            else:
                waiting.append((job, command(b"GETEX", name, b"PX", self._ttl_ms)))
        if not waiting:
            return None
        while (waiting or asked) and not link.is_spent:
            self._ask(link, waiting, asked)
            job = asked.popleft()
            pieces.end(job, self._receive(link, job))
        return True

    @staticmethod
    def _ask(link: Link, waiting: deque[tuple[Job[Piece], bytes]], asked: deque[Job[Piece]]) -> None:
        """Ask for the next objects, as long as not too much is under way."""
        commands, under_way = [], sum(job.size_bytes for job in asked)
        while waiting and (not asked or under_way + waiting[0][0].size_bytes <= UNDER_WAY_BYTES):
            job, one = waiting.popleft()
            asked.append(job)
            commands.append(one)
            under_way += job.size_bytes
        if commands:
            link.send(commands, asked[0].deadline)

    def _receive(self, link: Link, job: Job[Piece]) -> Outcome:
        key, (target,) = job.work.key, job.work.views
        try:
            if not self._take(link, key, target, job.deadline):
                self._forgotten.missing(key)
                return Outcome("miss")
        except CorruptObjectError as error:
            self._condemn(key, error)
            return Outcome("corrupt", detail=str(error))
        return Outcome("ok", target.nbytes)

    def _take(self, link: Link, key: ObjectKey, target: memoryview, deadline: Deadline) -> bool:
        """Receive an object, if there is one, and check it meanwhile. Raises CorruptObjectError, LinkBrokenError and
        ErrorReplyError."""
        try:
            size = link.bulk_size(deadline)
        except ErrorReplyError as error:
            if error.code != "WRONGTYPE":
                raise
            raise CorruptObjectError("magic", "something else has the object's name") from None
        if size is None:
            return False
        if size != target.nbytes:
            link.skip(size, deadline)
            raise CorruptObjectError("short", f"{size} bytes instead of {target.nbytes}")
        at = 0

        def arrived(stop: int) -> None:
            nonlocal at
            if stop > at:
                start, at = at, min(size, max(stop, at + READ_BYTES))
                link.read_part(target[start:at], deadline)

        try:
            self._codec.open(target, key, arrived)
        except CorruptObjectError:
            link.skip(size - at, deadline)
            raise
        link.end_string(deadline)
        return True


class Saving:
    """Sets objects that the server does not have; what it has is kept for another `ttl_ms`."""

    def __init__(self, forgotten: Forgotten, codec: ObjectCodec, ttl_ms: int) -> None:
        self._forgotten, self._codec = forgotten, codec
        self._ttl_ms = b"%d" % ttl_ms
        self._tail = b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(self._ttl_ms), self._ttl_ms)

    def __call__(self, link: Link, pieces: Pieces[Piece], count: int) -> bool | None:
        named = self._name(pieces, count)
        if not named:
            return None
        sent = []
        for job, name in self._absent(link, pieces, named):
            try:
                link.send(self._set(job, name), job.deadline)
                sent.append((job, name))
            except CorruptObjectError as error:
                pieces.end(job, Outcome("refused", detail=str(error)))
        did_well = True
        for job, name in sent:
            try:
                link.reply(job.deadline, MAX_REPLY_BYTES)
            except ErrorReplyError as error:
                # Full, for example: the next ones have to be read all the same.
                did_well = False
                pieces.end(job, Outcome("failed", detail=str(error)))
            else:
                pieces.end(job, self._stored(job, name))
        return did_well

    def _name(self, pieces: Pieces[Piece], count: int) -> list[tuple[Job[Piece], bytes]]:
        """Return jobs with their objects' names, when the server has forgotten what had these before."""
        named, patience = [], Deadline.after(SETTLE_S)
        for job in pieces.first(count):
            name = self._forgotten.wait_name(job.work.key, min(job.deadline, patience, key=lambda one: one.at_s))
            if name is not None:
                named.append((job, name))
            elif job.deadline.passed:
                pieces.end(job, Outcome("late"))
            else:
                pieces.end(job, Outcome("refused", detail="the server has yet to forget an object of this name"))
        return named

    def _absent(
        self, link: Link, pieces: Pieces[Piece], named: Sequence[tuple[Job[Piece], bytes]]
    ) -> list[tuple[Job[Piece], bytes]]:
        """End the saves of objects that are there already, and return the others."""
        deadline = named[0][0].deadline
        link.send([command(b"PEXPIRE", name, self._ttl_ms) for _, name in named], deadline)
        absent = []
        for job, name in named:
            if link.reply(deadline, MAX_REPLY_BYTES) == 1:
                pieces.end(job, self._stored(job, name, size_bytes=0))
            else:
                absent.append((job, name))
        return absent

    def _set(self, job: Job[Piece], name: bytes) -> list[Argument]:
        """Return the command. Raises CorruptObjectError for what cannot be sealed."""
        parts = self._codec.seal(job.work.key, job.work.views)
        size = sum(part.nbytes for part in parts)
        return [b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, size), *parts, self._tail]

    def _stored(self, job: Job[Piece], name: bytes, size_bytes: int | None = None) -> Outcome:
        if self._forgotten.stored(job.work.key, name):
            return Outcome("ok", job.size_bytes if size_bytes is None else size_bytes)
        return Outcome("cancelled", detail="dropped meanwhile")
