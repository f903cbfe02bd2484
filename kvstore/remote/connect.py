"""Connections to one server, made within a time, with TLS and a password where they are asked for.

Names are looked up apart from connecting: a name server that hangs must hang nobody who has a deadline.
"""

from __future__ import annotations

import socket
import ssl
import threading
from typing import Any

from kvstore.errors import TierUnusableError
from kvstore.remote.address import Address, TlsFiles
from kvstore.remote.link import STALL_S, ErrorReplyError, Link, LinkBrokenError, LinkSlowError
from kvstore.tier import Deadline

CONNECT_S = 0.2
MAX_ANSWER_BYTES = 4096

Place = tuple[int, Any]
"""Family and address of a socket."""


class Connector:
    """Makes links, and knows all that are open. Raises TierUnusableError when the TLS files cannot be read."""

    def __init__(self, address: Address, *, connect_s: float = CONNECT_S, stall_s: float = STALL_S) -> None:
        self._address, self._connect_s, self._stall_s = address, connect_s, stall_s
        self._tls = None if address.tls is None else _tls_context(address.tls)
        self._places: list[Place] = [(socket.AF_UNIX, address.path)] if address.path else []
        self.is_closed = False
        self._lock = threading.Lock()
        self._links: set[Link] = set()

    def resolve(self) -> None:
        """Look the server's name up, however long that takes. Raises LinkBrokenError."""
        if self._address.path:
            return
        try:
            found = socket.getaddrinfo(self._address.host, self._address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise LinkBrokenError(f"{self._address.host}: {error.strerror}") from None
        self._places = [(family, address) for family, _, _, _, address in found]

    def open(self, deadline: Deadline) -> Link:
        """Return a new link. Raises LinkBrokenError, and ErrorReplyError when the server refuses who asks."""
        until = Deadline(min(deadline.at_s, Deadline.after(self._connect_s).at_s))
        link = Link(self._connect(until), self._stall_s)
        try:
            with self._lock:
                if self.is_closed:
                    raise LinkBrokenError("the tier is closed")
                self._links.add(link)
            self._introduce(link, until)
        except BaseException:
            self.close(link)
            raise
        return link

    def close(self, link: Link) -> None:
        with self._lock:
            self._links.discard(link)
        link.close()

    def abort_all(self) -> None:
        """Make no more links, and let nobody wait on those that are open."""
        with self._lock:
            self.is_closed = True
            for link in self._links:
                link.abort()

    def _connect(self, until: Deadline) -> socket.socket:
        reason = "its name has not been looked up yet"
        for family, place in self._places:
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                _give_time(sock, until)
                sock.connect(place)
                return self._secure(sock, until)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                sock.close()
            except BaseException:
                sock.close()
                raise
        raise LinkBrokenError(f"{self._address}: {reason}")

    def _secure(self, sock: socket.socket, until: Deadline) -> socket.socket:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._tls is None:
            return sock
        _give_time(sock, until)
        return self._tls.wrap_socket(sock, server_hostname=self._address.host)

    def _introduce(self, link: Link, until: Deadline) -> None:
        address = self._address
        if address.password:
            who = (address.username, address.password) if address.username else (address.password,)
            try:
                link.call(b"AUTH", *(text.encode() for text in who), deadline=until, max_bytes=MAX_ANSWER_BYTES)
            except ErrorReplyError as error:
                # Not the server's own words: some of them repeat what they were sent.
                raise ErrorReplyError(f"{error.code} (in answer to the password)".encode()) from None
        if address.database:
            link.call(b"SELECT", b"%d" % address.database, deadline=until, max_bytes=MAX_ANSWER_BYTES)


class LinkSlot:
    """The one link of a thread, made when it is needed and made again after it broke."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._link: Link | None = None
        self._used_bytes = 0

    def get(self, deadline: Deadline) -> Link:
        """Raises LinkBrokenError and ErrorReplyError."""
        if self._link is not None and self._link.is_spent:
            self.drop()
        if self._link is None:
            self._link = self._connector.open(deadline)
            self._used_bytes = -1
        else:
            self._used_bytes = self._link.received_bytes
        return self._link

    @property
    def was_stale(self) -> bool:
        """Whether the link was an old one and nothing has come since it was got last: when it broke, that says nothing
        of the server as it is now, which may have been started again meanwhile."""
        return self._link is not None and self._used_bytes == self._link.received_bytes

    def drop(self) -> None:
        if self._link is not None:
            self._connector.close(self._link)
            self._link = None


def _give_time(sock: socket.socket, until: Deadline) -> None:
    left = until.left_s
    if left <= 0:
        raise LinkSlowError("the server did not answer in time")
    sock.settimeout(left)


def _tls_context(files: TlsFiles) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=files.authorities)
        if files.certificate is not None:
            context.load_cert_chain(files.certificate, files.key)
    except (OSError, ssl.SSLError) as error:
        raise TierUnusableError(f"the files for TLS cannot be used: {error}") from None
    return context
