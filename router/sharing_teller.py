"""Tells followers of one process's leases, and answers what they ask about requests that it has routed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from router.decision import Decision
from router.own_leases import OwnLeases
from router.sharing_messages import (
    HEARTBEAT_S,
    MAX_FOLLOWER_FRAME_BYTES,
    MAX_PAGE_BYTES,
    MAX_PEERS,
    SHARING_VERSION,
    Ask,
    Changes,
    Event,
    Follow,
    FollowerMessage,
    Refused,
    Snapshot,
    TellerMessage,
    Told,
)
from router.sharing_socket import Socket, SocketKeys, SocketReader

UNREAD_LIMIT_MESSAGES = 1_000
"""To one follower: at least ten seconds of batches."""


class Teller:
    """`find` returns this process's own decisions about a request. Raises zmq.ZMQError when `address` cannot be had."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        own: OwnLeases,
        peer_id: str,
        keys: SocketKeys | None,
        counters: Counter[str],
        find: Callable[[str], Sequence[Decision]],
    ) -> None:
        self._own = own
        self._find = find
        self._peer_id = peer_id
        self._counters = counters
        self._streams: dict[bytes, list[int]] = {}
        self._quiet_since = 0.0
        self._decode = msgspec.msgpack.Decoder(FollowerMessage).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._socket: Socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FOLLOWER_FRAME_BYTES)
        self._socket.set(zmq.SNDHWM, UNREAD_LIMIT_MESSAGES)
        self._socket.set(zmq.LINGER, 0)
        if keys is not None:
            keys.secure_server(self._socket)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._socket.close(0)  # else the context could never end
            raise
        self.address: str = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._reader = SocketReader(self._socket, self._receive)

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
            message: FollowerMessage = self._decode(frame)
        except (ValueError, msgspec.MsgspecError, RecursionError):
            self._counters["malformed_frames"] += 1
            return
        if isinstance(message, Follow):
            self._begin(identity, message)
        elif identity in self._streams:
            self._answer(identity, message)

    def _begin(self, identity: bytes, follow: Follow) -> None:
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

    def _answer(self, identity: bytes, ask: Ask) -> None:
        found = self._find(ask.request_id)[max(0, ask.skip) :]
        page = _first_page(found)
        self._send(identity, Told(ask.number, page, len(found) - len(page)))

    def _send(self, identity: bytes, message: TellerMessage) -> None:
        try:
            self._socket.send_multipart((identity, self._encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # EHOSTUNREACH: it left. EAGAIN: it has not read for seconds, and will find that messages are missing.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if self._streams.pop(identity, None) is not None:
                self._counters["lost_followers"] += 1


def _first_page(decisions: Sequence[Decision]) -> list[Decision]:
    """Return as many as a message has room for, one at least. One that is too large by itself (it lists thousands of
    targets that were passed over) goes without that list."""
    page: list[Decision] = []
    size_bytes = 0
    for decision in decisions:
        size_bytes += len(msgspec.msgpack.encode(decision))
        if size_bytes > MAX_PAGE_BYTES:
            return page or [msgspec.structs.replace(decision, passed_over={})]
        page.append(decision)
    return page
