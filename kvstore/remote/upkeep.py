"""One thread beside those that load and save: it meets the server, learns epochs, and has it forget what is to go."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvstore.object_key import ObjectKey
from kvstore.remote.address import Address
from kvstore.remote.connect import Connector, LinkSlot
from kvstore.remote.forgotten import Forgotten
from kvstore.remote.lanes import soonest
from kvstore.remote.link import STALL_S, ErrorReplyError, Link, LinkBrokenError, command
from kvstore.remote.names import EPOCHS, PATTERN, VERSION, Selection, field_of, parse_name, selected
from kvstore.remote.server_info import advice_on, read_info, read_settings, refusal_of
from kvstore.tier import Deadline

log = logging.getLogger(__name__)

TICK_S = 5.0
"""How often the server is asked for its epochs: a drop by another process is known here after that long."""

RETRY_S = 1.0
MAX_REPLY_BYTES = 64 << 20
AT_ONCE = 500
"""Keys in one command."""

MAX_TOUCHES = 10_000
NOT_REACHED = "the server has not been reached yet"

_LASTING = ("NOAUTH", "WRONGPASS", "NOPERM", "WRONGTYPE", "ERR")
_CROWDED = "max number of clients"


class UnfitServerError(Exception):
    """The server answers, and it is none that can be used."""


class Upkeep:
    """`refusal` says why nothing can be asked of the server, "" while it can. `info` is what it last said of itself. An
    answer may take `call_s`."""

    def __init__(
        self, address: Address, connector: Connector, forgotten: Forgotten, ttl_ms: int, call_s: float = STALL_S
    ) -> None:
        self.refusal, self.info = NOT_REACHED, dict[str, str]()
        self.met = threading.Event()
        """Set after the first try to reach the server."""
        self._address, self._connector, self._forgotten = address, connector, forgotten
        self._ttl_ms, self._call_s = b"%d" % ttl_ms, call_s
        self._slot = LinkSlot(connector)
        self._changed = threading.Condition()
        self._woken = self._closing = False
        self._until = Deadline(float("inf"))
        self._touches: deque[ObjectKey] = deque(maxlen=MAX_TOUCHES)
        self._version: bytes | None = None
        self._advised = self._purges = False
        self._complaint = ""
        self._thread = threading.Thread(target=self._run, name="kv-remote-upkeep", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something that the server is to forget."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Have objects kept for longer, within a tick; the first of `keys` is the last to go."""
        self._touches.extend(reversed(keys))

    def close(self, deadline: Deadline) -> None:
        """Have the server forget what it is to forget, until the deadline."""
        with self._changed:
            self._until, self._closing = deadline, True
            self._changed.notify_all()
        self._thread.join(deadline.left_s)

    # The thread

    def _run(self) -> None:
        next_visit_s = 0.0
        while not self._wait(next_visit_s):
            is_due = time.monotonic() >= next_visit_s
            went_well = self._round(self._visit if is_due else self._tell)
            if is_due or not went_well:
                next_visit_s = time.monotonic() + (TICK_S if went_well else RETRY_S)
            self.met.set()
        if not self.refusal:
            self._round(self._tell)
        self._slot.drop()

    def _wait(self, until_s: float) -> bool:
        """Wait until there is something to do; return whether it is time to end."""
        with self._changed:
            # While the server is away, what it is to forget does not bring it back.
            self._changed.wait_for(
                lambda: self._closing or (self._woken and not self._complaint), max(0.0, until_s - time.monotonic())
            )
            self._woken = False
            return self._closing

    def _round(self, work: Callable[[Link], None]) -> bool:
        """Return whether it went well; what did not is tried again in the next round."""
        try:
            if self._complaint or self.refusal:
                self._connector.resolve()
            work(self._slot.get(self._soon()))
        except (LinkBrokenError, ErrorReplyError, UnfitServerError) as error:
            self._slot.drop()
            self._complain(error)
            return False
        except Exception:
            log.exception("a fault in the remote tier")
            self._slot.drop()
            return False
        self._complaint = ""
        return True

    def _complain(self, error: Exception) -> None:
        reason = str(error)
        if reason != self._complaint:
            log.warning("the KV server %s: %s", self._address, reason)
        self._complaint = reason
        if isinstance(error, UnfitServerError) or (self.refusal and _is_lasting(error)):
            self.refusal = f"{self._address}: {reason}"

    def _visit(self, link: Link) -> None:
        self.info = dict(read_info(link, self._soon()))
        if refusal := refusal_of(self.info):
            raise UnfitServerError(refusal)
        if not self._advised:
            self._advised = True
            for advice in advice_on(self.info, read_settings(link, self._soon())):
                log.warning("the KV server %s: %s", self._address, advice)
        self._learn(link)
        self.refusal = ""
        self._tell(link)
        while self._touches:
            self._refresh(link)
        if self._purges:
            self._purges = not self._purge(link, lambda key, epoch: not self._forgotten.is_current(key, epoch))

    def _learn(self, link: Link) -> None:
        """Read the epochs if they have changed, or if the server has lost them."""
        version = link.call(b"HGET", EPOCHS, VERSION, deadline=self._soon(), max_bytes=MAX_REPLY_BYTES)
        if self._forgotten.knows_epochs and version == self._version:
            return
        self._forgotten.learn(self._read_epochs(link))

    def _read_epochs(self, link: Link) -> dict[bytes, int]:
        told = link.call(b"HGETALL", EPOCHS, deadline=self._soon(), max_bytes=MAX_REPLY_BYTES)
        if not isinstance(told, list) or not all(isinstance(one, bytes) and len(one) < 200 for one in told):
            raise LinkBrokenError("the epochs cannot be read")
        texts = [one for one in told if isinstance(one, bytes)]
        counts = dict(zip(texts[::2], texts[1::2], strict=False))
        self._version = counts.pop(VERSION, None)
        return {name: int(count) for name, count in counts.items() if count.isdigit() and len(count) < 13}

    # What the server is to forget

    def _tell(self, link: Link) -> None:
        """Have it forget all that waits."""
        while (selection := self._forgotten.next_drop()) is not None:
            if not self._drop(link, selection):
                return
        while deletions := self._forgotten.next_deletions(AT_ONCE):
            keys = [key for key, _ in deletions]
            try:
                self._unlink(link, [name for _, name in deletions])
            except BaseException:
                self._forgotten.delete_again(keys)
                raise
            self._forgotten.deleted(keys)

    def _drop(self, link: Link, selection: Selection) -> bool:
        """Count the selection's epoch up; where that cannot be, delete what is selected, however long it takes. Return
        whether it was done before the tier is closed."""
        version = secrets.token_hex(8).encode()
        commands = [
            command(b"HINCRBY", EPOCHS, field_of(selection), b"1"),
            command(b"HSET", EPOCHS, VERSION, version),
        ]
        link.send(commands, self._soon())
        refused = 0
        for _ in commands:
            try:
                link.reply(self._soon(), MAX_REPLY_BYTES)
            except ErrorReplyError as error:
                refused += 1
                log.warning("the KV server %s cannot count a drop: %s", self._address, error)
        if refused and not self._purge(link, lambda key, _: selected(key, selection)):
            return False
        self._forgotten.dropped(selection, None if refused else self._read_epochs(link))
        self._purges = self._purges or not refused
        return True

    def _purge(self, link: Link, is_gone: Callable[[ObjectKey, int], bool]) -> bool:
        """Look at everything the server has and delete what is gone; return whether that was all of it."""
        cursor: bytes = b"0"
        while True:
            if self._closing:
                return False
            arguments = (b"SCAN", cursor, b"MATCH", PATTERN, b"COUNT", b"%d" % AT_ONCE)
            told = link.call(*arguments, deadline=self._soon(), max_bytes=MAX_REPLY_BYTES)
            if not isinstance(told, list) or len(told) != 2 or not isinstance(told[0], bytes):
                raise LinkBrokenError("a scan without a cursor")
            cursor = told[0]
            self._unlink(link, list(_gone(told[1] if isinstance(told[1], list) else [], is_gone)))
            if cursor == b"0":
                return True

    def _unlink(self, link: Link, names: Sequence[bytes]) -> None:
        if names:
            link.call(b"UNLINK", *names, deadline=self._soon(), max_bytes=MAX_REPLY_BYTES)

    def _refresh(self, link: Link) -> None:
        """Have objects kept for longer."""
        keys = [self._touches.popleft() for _ in range(min(AT_ONCE, len(self._touches)))]
        named = [name for key in keys if (name := self._forgotten.name(key)) is not None]
        link.send([command(b"PEXPIRE", name, self._ttl_ms) for name in named], self._soon())
        for _ in named:
            link.reply(self._soon(), MAX_REPLY_BYTES)

    def _soon(self) -> Deadline:
        return soonest(self._until, self._call_s)


def _is_lasting(error: Exception) -> bool:
    """Whether the server will say the same until somebody sets it up otherwise."""
    return isinstance(error, ErrorReplyError) and error.code in _LASTING and _CROWDED not in str(error)


def _gone(names: Iterable[object], is_gone: Callable[[ObjectKey, int], bool]) -> Iterable[bytes]:
    for name in names:
        if not isinstance(name, bytes):
            continue
        try:
            key, epoch = parse_name(name)
        except ValueError:
            continue
        if is_gone(key, epoch):
            yield name
