"""One reader of one publisher's events, on an asyncio loop: it keeps a view right, and asks for what it has missed.

While something is asked for nothing is read: what was published meanwhile waits in the socket, and what does not fit
there is found missing afterwards. So memory is bounded by the socket's limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvstore.events.codec import BadEventError, decode_batch
from kvstore.events.messages import (
    DIGEST,
    DUMP,
    END_NUMBER,
    MAX_FRAME_BYTES,
    BlockHash,
    BlockStored,
    DumpPart,
    EventBatch,
)
from kvstore.events.stream import EventStream, View
from kvstore.keys import KEY_BYTES

log = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]
Message = tuple[int, bytes]
"""Number and payload."""

UNREAD_BATCHES = 2_000
ANSWER_S = 5.0
"""How long the publisher may be silent in the middle of an answer."""

RETRY_S = 0.2
RETRY_MAX_S = 5.0

SILENCE_S = 15.0
"""A publisher with heartbeats that is silent for so long is out of reach, and what it holds is not known any more."""

NUMBER_BYTES = 8
MAX_ANSWER_BYTES = 1024 * 1024 * 1024
"""A dump of thirty million blocks. What waits to be taken over is bounded by it, whoever answers."""

MESSAGE_BYTES = 256
"""What a message costs beside its payload."""

MAX_BATCHES_PER_TURN = 64
SLICE_BYTES = 1024 * KEY_BYTES
"""Of a dump. The loop has other work than events."""


class EventSubscriber:
    """`open` and `close` on the running loop. `on_batch` hears of every batch that was applied, e.g. for its age.

    Without `replay_address`, or with one that knows no dumps, what was before is never known; claims are missing then,
    but none is wrong. `counters` are cumulative.
    """

    def __init__(
        self,
        address: str,
        replay_address: str | None,
        view: View,
        *,
        context: zmq.Context[Socket],
        topic: str = "",
        dumps: bool = True,
        secure: Callable[[Socket], None] | None = None,
        on_batch: Callable[[EventBatch], None] | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.stream = EventStream(view)
        self.malformed = 0
        self._address, self._replay_address, self._topic = address, replay_address, topic
        self._view, self._context, self._secure, self._on_batch = view, context, secure, on_batch
        self._dumps = dumps and replay_address is not None
        self._silence_s = silence_s
        self._heard_s = 0.0
        self._socket: Socket | None = None
        self._fd = -1
        self._recovery: asyncio.Task[None] | None = None
        self._question: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None

    @property
    def synced(self) -> bool:
        """Whether the view is right as of what has arrived."""
        return self._socket is not None and self.stream.need is None

    @property
    def counters(self) -> dict[str, int]:
        return {**self.stream.counters, "malformed": self.malformed}

    def open(self) -> None:
        loop = asyncio.get_running_loop()
        socket = self._context.socket(zmq.SUB)
        try:
            self._prepare(socket)
            socket.set(zmq.RCVHWM, UNREAD_BATCHES)
            socket.set(zmq.SUBSCRIBE, self._topic.encode())
            socket.connect(self._address)
        except zmq.ZMQError:
            socket.close(0)
            raise
        self._socket, self._fd = socket, int(socket.fileno())
        loop.add_reader(self._fd, self._read)
        self._heard_s = time.monotonic()
        self._look_for_silence()
        # Subscribed first, asked afterwards: what is published in between comes twice rather than never.
        self._recover()

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._fd)
        if self._watch is not None:
            self._watch.cancel()
        for task in (self._recovery, self._question):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        socket.close(0)

    def check_digest(self) -> None:
        """Ask for the digest now instead of waiting for the next heartbeat. Only a difference leads to anything."""
        if self.synced and self._dumps and (self._question is None or self._question.done()):
            self._question = asyncio.get_running_loop().create_task(self._check_digest())

    # ---- what is published

    def _read(self) -> None:
        """Edge-triggered: go on until nothing is left, or see to it that somebody does."""
        socket = self._socket
        if socket is None:
            return
        for _ in range(MAX_BATCHES_PER_TURN):
            if self.stream.need is not None:
                self._recover()
                return
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard_s = time.monotonic()
            self._take(frames)
        asyncio.get_running_loop().call_soon(self._read)

    def _take(self, frames: list[bytes]) -> None:
        try:
            _, number, payload = frames
            batch = decode_batch(payload)
            if len(number) != NUMBER_BYTES:
                raise BadEventError("a number has 8 bytes")
        except ValueError:
            # It may have been anything: the number behind it will show that something is missing.
            self.malformed += 1
            return
        expected = self.stream.next_number
        self.stream.offer(int.from_bytes(number, "big"), batch)
        if self._on_batch is not None and self.stream.next_number != expected:
            self._on_batch(batch)

    def _look_for_silence(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(self._silence_s / 3, self._look_for_silence)
        if self.stream.need is None and self.stream.epoch and time.monotonic() > self._heard_s + self._silence_s:
            log.warning("no KV events from %s for %g s: what it holds is not known", self._address, self._silence_s)
            self._heard_s = time.monotonic()
            self._view.clear()
            self.stream.need = "dump"
            self._recover()

    # ---- what is asked for

    def _recover(self) -> None:
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.get_running_loop().create_task(self._ask_until_right())

    async def _ask_until_right(self) -> None:
        wait_s = RETRY_S
        while self.stream.need is not None:
            try:
                await self._ask()
            except (TimeoutError, ValueError, msgspec.MsgspecError, zmq.ZMQError) as error:
                log.info("no %s from %s: %s", self.stream.need, self._replay_address, error or "too slow")
                # What is missing may be removals: better no claims than wrong ones.
                self._view.clear()
                self.stream.need = "dump"
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, RETRY_MAX_S)
        self._heard_s = time.monotonic()
        asyncio.get_running_loop().call_soon(self._read)

    async def _ask(self) -> None:
        if self.stream.need == "replay" and self._replay_address is not None:
            for number, payload in await self._exchange(self.stream.next_number.to_bytes(8, "big")):
                self.stream.replay(number, decode_batch(payload))
                await asyncio.sleep(0)  # the loop has others to serve
            self.stream.end_replay()
        elif self._dumps:
            await self._load_dump(await self._exchange(DUMP))
        else:
            await self._begin_without_dump()

    async def _load_dump(self, messages: list[Message]) -> None:
        parts = [msgspec.msgpack.decode(payload, type=DumpPart) for _, payload in messages]
        if not parts or any((part.part, part.parts) != (at, len(parts)) for at, part in enumerate(parts)):
            raise ValueError("the dump is incomplete")
        self._view.clear()
        for part in parts:
            for start in range(0, len(part.keys), SLICE_BYTES):
                joined = part.keys[start : start + SLICE_BYTES]
                keys: list[BlockHash] = [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
                stored = BlockStored(
                    block_hashes=keys, parent_block_hash=None, token_ids=[], block_size=0, medium=part.medium
                )
                self._view.apply([stored])
                await asyncio.sleep(0)
        self.stream.end_dump(parts[0].epoch, messages[0][0])

    async def _begin_without_dump(self) -> None:
        """Start from the oldest batch that can be replayed; without any, from the next that is published."""
        messages = await self._exchange(bytes(8)) if self._replay_address is not None else []
        self.stream.begin_anywhere()
        for number, payload in messages:
            self.stream.offer(number, decode_batch(payload))
            await asyncio.sleep(0)

    async def _check_digest(self) -> None:
        try:
            for number, payload in await self._exchange(DIGEST):
                self.stream.check(number, decode_batch(payload))
        except (TimeoutError, ValueError, zmq.ZMQError) as error:
            log.info("no digest from %s: %s", self._replay_address, error or "too slow")
        if self.stream.need is not None:
            self._recover()

    async def _exchange(self, question: bytes) -> list[Message]:
        """Ask over a connection of its own: no answer to an earlier question can come in between."""
        assert self._replay_address is not None
        messages: list[Message] = []
        size_bytes = 0
        with zmq.asyncio.Socket(self._context, zmq.DEALER) as socket:
            self._prepare(socket)
            socket.connect(self._replay_address)
            await socket.send_multipart((b"", question))
            while True:
                frames = await asyncio.wait_for(socket.recv_multipart(), ANSWER_S)
                if len(frames) < 3:
                    raise BadEventError("an answer has an empty frame, a number and a payload")
                number, payload = frames[-2:]
                size_bytes += len(payload) + MESSAGE_BYTES
                if len(number) != NUMBER_BYTES or size_bytes > MAX_ANSWER_BYTES:
                    raise BadEventError("an answer's number has 8 bytes, and it comes to an end")
                if number == END_NUMBER:
                    return messages
                messages.append((int.from_bytes(number, "big"), payload))

    def _prepare(self, socket: zmq.Socket[Any]) -> None:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.set(zmq.HEARTBEAT_IVL, 3_000)
        socket.set(zmq.HEARTBEAT_TIMEOUT, 15_000)
        socket.set(zmq.RECONNECT_IVL, 50)
        socket.set(zmq.RECONNECT_IVL_MAX, 1_000)
        if self._secure is not None:
            self._secure(socket)
