"""Processes that route tell each other every dispatch, first output and release, over ZeroMQ.

Each binds one socket, at which it tells of its own leases, and follows all its peers. Nobody waits for anybody: a peer
that is away is routed without, and a follower that does not read is dropped and begins anew with a snapshot. There is
no consensus; what two processes dispatch within the same `BATCH_S`, each learns of a little late.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import zmq

from router.dispatches import DispatchObserver, RemoteDispatches
from router.own_leases import OwnLeases
from router.peer_leases import OutOfOrderError, PeerLeases
from router.registry.base import GatewayRecord
from router.sharing_messages import (
    BATCH_S,
    HEARTBEAT_S,
    MAX_FOLLOWER_FRAME_BYTES,
    MAX_TELLER_FRAME_BYTES,
    SHARING_VERSION,
    SILENCE_S,
    Changes,
    Event,
    Follow,
    Refused,
    Snapshot,
    TellerMessage,
)

log = logging.getLogger("headrace.sharing")

Socket = zmq.Socket[Any]

UNREAD_LIMIT_MESSAGES = 1_000
"""To one follower: at least ten seconds of batches."""

MAX_PEERS = 1_024
TICK_S = 0.1

RESYNC_PAUSE_S = 0.2
REFUSED_PAUSE_S = 5.0
KNOWN_PAUSE_S = 5.0
"""A peer that is followed already may lose its other address."""


class SocketKeys(Protocol):
    """CURVE for both ends. Both calls come before the socket is bound or connected."""

    def secure_server(self, socket: Socket) -> None: ...

    def secure_client(self, socket: Socket, server_key: str) -> None:
        """`server_key` is the peer's public key (Z85)."""
        ...


@dataclass(frozen=True)
class PeerAddress:
    """Where a peer tells its leases. `public_key` (Z85) is needed where CURVE is used."""

    address: str
    public_key: str | None = None

    @classmethod
    def of(cls, record: GatewayRecord) -> PeerAddress:
        return cls(record.dispatches, record.public_key)


class DispatchSharing:
    """`open()` on the loop that uses it, `close()` at the end. `counters` are cumulative.

    With `keys` every peer must have a public key, and peers without one are not followed. The context is the caller's,
    who may run a gate for CURVE in it; it outlives this object.
    """

    def __init__(self, listen: str, *, context: zmq.Context[Any] | None = None, keys: SocketKeys | None = None) -> None:
        self.peer_id = secrets.token_hex(8)
        self.counters: Counter[str] = Counter()
        self.address = listen
        self._context = context or zmq.Context.instance()
        self._keys = keys
        self._own = OwnLeases(self._note_change)
        self._receivers: dict[str, RemoteDispatches] = {}
        self._links: dict[PeerAddress, _Link] = {}
        self._teller: _Teller | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._batch: asyncio.TimerHandle | None = None
        self._progress = asyncio.Event()

    def observer(self, pool: str) -> DispatchObserver:
        """Return what the pool of this name tells its own leases to. The name is the same in all processes."""
        return self._own.observer(pool)

    def attach(self, pool: str, receiver: RemoteDispatches) -> None:
        """Pass on what peers tell of the pool of this name; they are followed anew, so that it learns of everything."""
        self._receivers[pool] = receiver
        for link in self._links.values():
            link.restart()

    def detach(self, pool: str) -> None:
        """The pool of this name is gone: what peers tell of it is only counted."""
        self._receivers.pop(pool, None)

    def open(self) -> None:
        """Bind; `address` then has the port. Raises zmq.ZMQError when the address cannot be had."""
        self._teller = _Teller(self._context, self.address, self._own, self.peer_id, self._keys, self.counters)
        self.address = self._teller.address
        self._tick = asyncio.get_running_loop().call_later(TICK_S, self._beat)

    def close(self) -> None:
        """Peers learn of it as of any death."""
        for timer in (self._tick, self._batch):
            if timer is not None:
                timer.cancel()
        self.set_peers(())
        if self._teller is not None:
            self._teller.close()

    def set_peers(self, peers: Iterable[PeerAddress]) -> None:
        """Follow these and no others; one's own address may be among them. Who is no longer listed is forgotten."""
        wanted = [peer for peer in dict.fromkeys(peers) if peer.address != self.address]
        if self._keys is not None:
            wanted = [peer for peer in wanted if peer.public_key is not None]
        listed = dict.fromkeys(wanted[:MAX_PEERS])
        for gone in [peer for peer in self._links if peer not in listed]:
            self._links.pop(gone).close()
        for peer in listed:
            if peer not in self._links:
                self._links[peer] = _Link(
                    peer, self._context, self._keys, self._receivers, self._is_known, self.counters
                )
        self._progress.set()

    @property
    def peers(self) -> dict[str, int]:
        """Leases under way by the peers that are followed now (peer id)."""
        links = self._links.values()
        return {link.leases.peer_id: len(link.leases) for link in links if link.leases.peer_id and link.is_synced}

    async def wait_synced(self) -> None:
        """Return when every listed peer has told all that it has under way, or has not answered for `SILENCE_S`."""
        while not all(link.is_settled for link in self._links.values()):
            self._progress.clear()
            await self._progress.wait()

    def _is_known(self, peer_id: str, asking: _Link) -> bool:
        """Whether a peer is this process itself, or is followed already under another address."""
        others = (link for link in self._links.values() if link is not asking)
        return peer_id == self.peer_id or any(link.leases.peer_id == peer_id for link in others)

    def _note_change(self, is_full: bool) -> None:
        if self._teller is None:
            self._own.take_changes()  # nobody can follow yet
        elif is_full:
            self._flush()
        elif self._batch is None:
            self._batch = asyncio.get_running_loop().call_later(BATCH_S, self._flush)

    def _flush(self) -> None:
        if self._batch is not None:
            self._batch.cancel()
            self._batch = None
        if self._teller is not None:
            self._teller.tell(self._own.take_changes())

    def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        self._tick = loop.call_later(TICK_S, self._beat)
        if self._teller is not None:
            self._teller.beat(loop.time())
        for link in self._links.values():
            link.beat(loop.time())
        self._progress.set()


class _Reader:
    """Calls `on_frames` for every message of a socket on the running loop. Its descriptor is edge-triggered: a reader
    goes on until nothing is left, and after a send it looks again."""

    def __init__(self, socket: Socket, on_frames: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = socket.fileno()
        self._loop.add_reader(self._fd, self.read)
        self._reading = False
        self._open = True
        self._loop.call_soon(self.read)

    def read(self) -> None:
        if self._reading:
            return
        self._reading = True
        try:
            while self._open:
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return
                self._on_frames(frames)
        finally:
            self._reading = False

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            self._socket.close(0)


class _Teller:
    """Tells followers of this process's leases."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        own: OwnLeases,
        peer_id: str,
        keys: SocketKeys | None,
        counters: Counter[str],
    ) -> None:
        self._own = own
        self._peer_id = peer_id
        self._counters = counters
        self._streams: dict[bytes, list[int]] = {}
        self._quiet_since = 0.0
        self._decode = msgspec.msgpack.Decoder(Follow).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._socket: Socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FOLLOWER_FRAME_BYTES)
        self._socket.set(zmq.SNDHWM, UNREAD_LIMIT_MESSAGES)
        self._socket.set(zmq.LINGER, 0)
        if keys is not None:
            keys.secure_server(self._socket)
        self._socket.bind(address)
        self.address: str = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._reader = _Reader(self._socket, self._receive)

    def tell(self, events: list[Event]) -> None:
        self._quiet_since = asyncio.get_running_loop().time()
        for identity in list(self._streams):
            stream, number = self._streams[identity]
            self._streams[identity][1] += 1
            self._send(identity, Changes(stream, number, events))
        self._reader.read()

    def beat(self, now_s: float) -> None:
        self._reader.read()
        if now_s - self._quiet_since >= HEARTBEAT_S:
            self.tell([])

    def close(self) -> None:
        self._reader.close()

    def _receive(self, frames: list[bytes]) -> None:
        try:
            identity, frame = frames
            follow = self._decode(frame)
        except (ValueError, msgspec.MsgspecError, RecursionError):
            self._counters["malformed_frames"] += 1
            return
        if follow.version != SHARING_VERSION:
            self._send(identity, Refused(SHARING_VERSION))
            return
        if identity not in self._streams and len(self._streams) >= MAX_PEERS:
            self._counters["refused_followers"] += 1
            return
        # What has not been told yet is in the snapshot and is told again: taken out first, so that it comes once.
        self.tell(self._own.take_changes())
        number = 0
        parts = list(self._own.snapshot())
        self._streams[identity] = [follow.stream, len(parts)]
        for number, part in enumerate(parts):
            self._send(identity, Snapshot(follow.stream, number, self._peer_id, part, number == len(parts) - 1))

    def _send(self, identity: bytes, message: TellerMessage) -> None:
        try:
            self._socket.send_multipart((identity, self._encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # EHOSTUNREACH: it left. EAGAIN: it has not read for seconds, and will find that messages are missing.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if self._streams.pop(identity, None) is not None:
                self._counters["lost_followers"] += 1


class _Link:
    """Follows one peer, again and again."""

    def __init__(
        self,
        peer: PeerAddress,
        context: zmq.Context[Any],
        keys: SocketKeys | None,
        receivers: dict[str, RemoteDispatches],
        is_known: Callable[[str, _Link], bool],
        counters: Counter[str],
    ) -> None:
        self._peer = peer
        self._context = context
        self._keys = keys
        self._receivers = receivers
        self._is_known = is_known
        self._counters = counters
        self._decode = msgspec.msgpack.Decoder(TellerMessage).decode
        self._has_tried = False
        self._stream = 0
        self._left_until: float | None = None
        self.leases = PeerLeases(receivers)
        self._reader: _Reader | None = None
        self._connect()

    @property
    def is_synced(self) -> bool:
        return self.leases.is_synced

    @property
    def is_settled(self) -> bool:
        """Whether it has told everything, or is not worth waiting for."""
        return self.is_synced or self._has_tried

    def restart(self) -> None:
        """Forget what the peer told and ask for all of it."""
        self.close()
        self._connect()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self.leases.forget()
        self.leases = PeerLeases(self._receivers)

    def beat(self, now_s: float) -> None:
        if self._left_until is not None:
            if now_s >= self._left_until:
                self.restart()
            return
        # What has arrived is read first: after a pause of this process everybody seems to have been silent.
        if self._reader is not None:
            self._reader.read()
        if self._left_until is None and now_s - self._heard_s >= SILENCE_S:
            if self.is_synced:
                self._counters["lost_peers"] += 1
                log.warning("the peer %s is silent; what it had under way is forgotten", self._peer.address)
            self._has_tried = True
            self.restart()

    def _connect(self) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        self._left_until = None
        self._stream += 1
        self.leases = PeerLeases(self._receivers)
        try:
            socket = self._open_socket()
        except zmq.ZMQError as error:
            # An address that nobody can have, or no descriptors left: the second may pass.
            log.warning("the peer %s cannot be followed: %s", self._peer.address, error)
            self._leave(REFUSED_PAUSE_S)
            return
        self._reader = _Reader(socket, self._receive)
        socket.send(msgspec.msgpack.encode(Follow(SHARING_VERSION, self._stream)), zmq.NOBLOCK)

    def _open_socket(self) -> Socket:
        socket: Socket = self._context.socket(zmq.DEALER)
        try:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.MAXMSGSIZE, MAX_TELLER_FRAME_BYTES)
            if self._keys is not None and self._peer.public_key is not None:
                self._keys.secure_client(socket, self._peer.public_key)
            socket.connect(self._peer.address)
        except zmq.ZMQError:
            socket.close(0)
            raise
        return socket

    def _receive(self, frames: list[bytes]) -> None:
        try:
            (frame,) = frames
            message = self._decode(frame)
        except (ValueError, msgspec.MsgspecError, RecursionError):
            self._counters["malformed_frames"] += 1
            return
        self._heard_s = asyncio.get_running_loop().time()
        if isinstance(message, Refused):
            self._counters["refused_by_peers"] += 1
            self._leave(REFUSED_PAUSE_S)
        elif message.stream != self._stream:
            self._counters["malformed_frames"] += 1
        elif isinstance(message, Snapshot) and self._is_known(message.peer_id, self):
            self._leave(KNOWN_PAUSE_S)
        else:
            self._take(message)

    def _take(self, message: Snapshot | Changes) -> None:
        try:
            self.leases.take(message)
        except OutOfOrderError as error:
            # Not anew at once: a peer that talks nonsense would keep both processes busy.
            self._counters["resyncs"] += 1
            log.warning("the peer %s is out of step (%s); following it anew", self._peer.address, error)
            self._leave(RESYNC_PAUSE_S)

    def _leave(self, pause_s: float) -> None:
        self.close()
        self._has_tried = True
        self._left_until = asyncio.get_running_loop().time() + pause_s


def peers_of(records: Collection[GatewayRecord]) -> list[PeerAddress]:
    """Return whom to follow of a registry's gateways."""
    return [PeerAddress.of(record) for record in records]
