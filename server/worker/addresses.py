"""Where a worker's sockets listen, and by which addresses others reach them. Knows ZeroMQ's address forms.

A worker binds its TCP ports itself and hands the listening sockets down: a core that is started again has the ports of
the one before it, and a port that is taken is a wrong setting at once. ipc:// addresses need no more than a name.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from engine.errors import ConfigError

LISTEN_BACKLOG = 1024
FORMS = "Write tcp://HOST:PORT or ipc://PATH."
_TCP = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[^\[\]:/\s]+):(?P<port>[0-9]{1,5})")
_WILDCARDS = ("0.0.0.0", "[::]", "*")


@dataclass(frozen=True)
class Place:
    """One socket's address. `advertised` is the one for other processes, `local` that for this machine. `fd` is of the
    socket that listens there, None for ipc."""

    address: str
    advertised: str
    local: str
    fd: int | None = None


@dataclass(frozen=True)
class RankPlaces:
    wire: Place
    events: Place
    events_replay: Place

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(place.fd for place in (self.wire, self.events, self.events_replay) if place.fd is not None)


def is_reachable_from_outside(address: str) -> bool:
    """Whether other machines can connect to a socket that listens there, or have the one that is connected to. Raises
    ConfigError for what is no address."""
    if address.startswith("ipc://"):
        return False
    host = _split(address)[0].strip("[]")
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def open_places(
    listen: str, events_listen: str | None, count: int, advertise: str | None, sockets: ExitStack
) -> list[RankPlaces]:
    """Return the places of `count` ranks; what listens is closed with `sockets`. Raises ConfigError.

    With ports P and E the rank r has P + r, E + 2r and E + 2r + 1. Port 0, and no `events_listen`, take free ports.
    """
    wires = [_open(one, advertise, sockets) for one in _addresses(listen, count)]
    if events_listen is None:
        is_ipc = listen.startswith("ipc://")
        events_listen = f"{listen}.events" if is_ipc else f"tcp://{_split(listen)[0]}:0"
    events = [_open(one, advertise, sockets) for one in _addresses(events_listen, 2 * count)]
    return [RankPlaces(wires[rank], events[2 * rank], events[2 * rank + 1]) for rank in range(count)]


def advertised_addresses(listen: str, count: int, advertise: str | None) -> list[tuple[str, str]]:
    """Return (address to listen at, address for others) of `count` sockets that are bound later.

    Raises ConfigError, also for port 0: what is told before it is bound must be known.
    """
    pairs = []
    for address in _addresses(listen, count):
        if address.startswith("ipc://"):
            pairs.append((address, address))
            continue
        host, port = _split(address)
        if port == 0:
            raise ConfigError(f"{address}: the port must be a fixed one here.")
        pairs.append((address, f"tcp://{_shown(host, advertise)}:{port}"))
    return pairs


def _shown(host: str, advertise: str | None) -> str:
    """The host by which others reach a socket, in brackets where it is an IPv6 address."""
    shown = advertise or (socket.gethostname() if host in _WILDCARDS else host)
    return f"[{shown}]" if ":" in shown and not shown.startswith("[") else shown


def _addresses(first: str, count: int) -> Sequence[str]:
    if first.startswith("ipc://"):
        return [first if number == 0 else f"{first}.{number}" for number in range(count)]
    host, port = _split(first)
    if port + count - 1 > 65535:
        raise ConfigError(f"{first}: {count} ports from there on do not exist.", hint="Choose a lower port.")
    return [f"tcp://{host}:{port and port + number}" for number in range(count)]


def _split(address: str) -> tuple[str, int]:
    """Return host, in brackets where it is an IPv6 address, and port."""
    match = _TCP.fullmatch(address)
    if match is None:
        raise ConfigError(f"{address[:200]!r} is no address to listen at.", hint=FORMS)
    return match["host"], int(match["port"])


def _open(address: str, advertise: str | None, sockets: ExitStack) -> Place:
    if address.startswith("ipc://"):
        if len(address) == len("ipc://"):
            raise ConfigError(f"{address!r} is no address to listen at.", hint=FORMS)
        return Place(address, address, address)
    host, port = _split(address)
    is_wildcard = host in _WILDCARDS
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        listener = socket.create_server(
            ("" if host == "*" else host.strip("[]"), port), family=family, backlog=LISTEN_BACKLOG
        )
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"Cannot listen at {address}: {reason}.", hint="Choose another address.") from None
    sockets.callback(listener.close)
    # Whoever accepts may find that the connection has gone already, and must not wait for the next one.
    listener.setblocking(False)
    port = listener.getsockname()[1]
    shown = _shown(host, advertise)
    local = ("[::1]" if family == socket.AF_INET6 else "127.0.0.1") if is_wildcard else host
    return Place(f"tcp://{host}:{port}", f"tcp://{shown}:{port}", f"tcp://{local}:{port}", listener.fileno())
