"""Follows one peer, again and again, and asks it about requests."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from router.decision import Decision
from router.dispatches import RemoteDispatches
from router.peer_leases import OutOfOrderError, PeerLeases
from router.sharing_messages import (
    MAX_PAGES,
    MAX_TELLER_FRAME_BYTES,
    SHARING_VERSION,
    SILENCE_S,
    Ask,
    Changes,
    Follow,
    FollowerMessage,
    PeerAddress,
    Refused,
    Snapshot,
    TellerMessage,
    Told,
)
from router.sharing_socket import Socket, SocketKeys, SocketReader

log = logging.getLogger("headrace.sharing")

RESYNC_PAUSE_S = 0.2
REFUSED_PAUSE_S = 5.0
KNOWN_PAUSE_S = 5.0
"""A peer that is followed already may lose its other address."""


class Link:
    """`is_known` tells whether a peer is followed under another address. It connects when it is made, until `close`."""

    def __init__(
        self,
        peer: PeerAddress,
        context: zmq.Context[Any],
        keys: SocketKeys | None,
        receivers: dict[str, RemoteDispatches],
        is_known: Callable[[str, Link], bool],
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
        self._questions: dict[int, asyncio.Future[Told | None]] = {}
        self._last_question = 0
        self.is_double = False
        """Whether its peer is followed under another address, or is this process."""
        self.leases = PeerLeases(receivers)
        self._socket: Socket | None = None
        self._reader: SocketReader | None = None
        self._connect()

    @property
    def is_synced(self) -> bool:
        return self.leases.is_synced

    @property
    def is_settled(self) -> bool:
        """Whether it has told everything, or is not worth waiting for."""
        return self.is_synced or self._has_tried

    async def explain(self, request_id: str) -> list[Decision] | None:
        """Return what the peer has decided about a request; None when it cannot be asked, or is lost meanwhile. A peer
        that does not answer is waited for: the caller has the patience."""
        decisions: list[Decision] = []
        for _ in range(MAX_PAGES):
            told = await self._ask(request_id, len(decisions))
            if told is None:
                return None
            decisions += told.decisions
            if told.left <= 0 or not told.decisions:
                break
        return decisions

    async def _ask(self, request_id: str, skip: int) -> Told | None:
        if not self.is_synced or self._reader is None:
            return None
        self._last_question += 1
        number = self._last_question
        answer: asyncio.Future[Told | None] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        try:
            self._send(Ask(number, request_id, skip))
            self._reader.read()
            return await answer
        except zmq.Again:  # it reads nothing
            return None
        finally:
            self._questions.pop(number, None)

    def restart(self) -> None:
        """Forget what the peer told and ask for all of it."""
        self.close()
        self._connect()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = self._socket = None
        for answer in self._questions.values():
            if not answer.done():
                answer.set_result(None)
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
            self._socket = self._open_socket()
        except zmq.ZMQError as error:
            # An address that nobody can have, or no descriptors left: the second may pass.
            log.warning("the peer %s cannot be followed: %s", self._peer.address, error)
            self._leave(REFUSED_PAUSE_S)
            return
        self._reader = SocketReader(self._socket, self._receive)
        self._send(Follow(SHARING_VERSION, self._stream))

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

    def _send(self, message: FollowerMessage) -> None:
        """Raises zmq.Again when the peer has not read for thousands of messages."""
        assert self._socket is not None, "the link is connected"
        self._socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)

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
        elif isinstance(message, Told):
            answer = self._questions.get(message.number)
            if answer is not None and not answer.done():  # else nobody waits for it any more
                answer.set_result(message)
        elif message.stream != self._stream:
            self._counters["malformed_frames"] += 1
        elif isinstance(message, Snapshot) and self._is_known(message.peer_id, self):
            self.is_double = True
            self._leave(KNOWN_PAUSE_S)
        else:
            self._take(message)

    def _take(self, message: Snapshot | Changes) -> None:
        self.is_double = False
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
