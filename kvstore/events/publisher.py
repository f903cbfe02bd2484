"""The publisher of a cache's events: never waits, never makes its owner wait.

`publish` puts a step's events into a bounded queue; a thread numbers, sends and keeps them for replay, and holds the
set of keys that they add up to, for dumps and digests. When the queue is full events are dropped, and the view begins
anew under another epoch with all that the cache holds then, so that no reader goes on with a view that has holes.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import zmq

from kvstore.events.log import REPLAY_BATCHES, Content, EventLog, Frames
from kvstore.events.messages import Event

log = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]

QUEUE_BATCHES = 10_000
UNREAD_BATCHES = 10_000
"""What a reader may leave unread before batches are dropped for it. It finds the gap and asks for them."""

MAX_QUESTION_BYTES = 4096
HEARTBEAT_S = 1.0

QUESTIONS_PER_ROUND = 64
"""A flood of questions may not keep events from being sent."""

DRAIN_S = 5.0
"""How long `close` waits for the thread."""


class EventPublisher:
    """`publish` and `close` belong to one thread, the owner's.

    `content` returns all that the owner's cache holds now, by tier: 32-byte keys. It is called by `publish`, after
    events were dropped. `secure` prepares a socket before it is bound, e.g. with keys. Addresses are ZeroMQ's, and
    `address` and `replay_address` are the ones bound in the end. `counters` are cumulative.
    """

    def __init__(
        self,
        address: str,
        replay_address: str,
        content: Callable[[], Content],
        *,
        dp_rank: int | None = None,
        topic: str = "",
        context: zmq.Context[Socket] | None = None,
        secure: Callable[[Socket], None] | None = None,
        queue_batches: int = QUEUE_BATCHES,
        replay_batches: int = REPLAY_BATCHES,
        unread_batches: int = UNREAD_BATCHES,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.counters = {"batches": 0, "dropped_batches": 0, "epochs": 0, "bad_questions": 0}
        self._content, self._queue_batches, self._heartbeat_s = content, queue_batches, heartbeat_s
        self._context = context or zmq.Context()
        self._owns_context = context is None
        self._events = self._bind(zmq.PUB, address, unread_batches, secure)
        self._questions = self._bind(zmq.ROUTER, replay_address, UNREAD_BATCHES, secure)
        self.address = self._events.get_string(zmq.LAST_ENDPOINT)
        self.replay_address = self._questions.get_string(zmq.LAST_ENDPOINT)
        self._bell, self._bell_inside = self._pair()
        self._queue: deque[Sequence[Event] | Content] = deque()
        self._dropped = False
        self._stopping = False
        self._log = EventLog(topic.encode(), dp_rank, replay_batches)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> int:
        """Batches that are not sent yet."""
        return len(self._queue)

    def publish(self, events: Sequence[Event]) -> None:
        """Queue one step's events. Call it also without any now and then: it makes good what was dropped before."""
        if self._dropped:
            if self._queue:
                self.counters["dropped_batches"] += bool(events)
                return
            # What the cache holds includes these events.
            self._dropped = False
            self._queue.append({tier: list(keys) for tier, keys in self._content().items()})
        elif len(self._queue) >= self._queue_batches:
            self._dropped = True
            self.counters["dropped_batches"] += 1
            return
        elif events:
            self._queue.append(events)
        else:
            return
        self._ring()

    def close(self) -> None:
        self._stopping = True
        self._ring()
        self._thread.join(DRAIN_S)
        if self._thread.is_alive():
            return  # the sockets are its own; they end with the process
        for socket in (self._bell, self._bell_inside, self._events, self._questions):
            socket.close(0)
        if self._owns_context:
            self._context.term()

    def _bind(self, kind: int, address: str, unread: int, secure: Callable[[Socket], None] | None) -> Socket:
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, unread)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)
        socket.set(zmq.HEARTBEAT_IVL, 3_000)
        socket.set(zmq.HEARTBEAT_TIMEOUT, 15_000)
        if secure is not None:
            secure(socket)
        socket.bind(address)
        return socket

    def _pair(self) -> tuple[Socket, Socket]:
        ends = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        name = f"inproc://kv-events-{secrets.token_hex(8)}"
        ends[1].bind(name)
        ends[0].connect(name)
        return ends

    def _ring(self) -> None:
        with contextlib.suppress(zmq.Again):  # so many unheard rings will do as well
            self._bell.send(b"", zmq.NOBLOCK)

    # ---- the thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            log.exception("the publisher of KV events has failed: nothing more is published")

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell_inside, zmq.POLLIN)
        poller.register(self._questions, zmq.POLLIN)
        self._send(self._log.begin({}))
        next_beat_s = time.monotonic() + self._heartbeat_s
        while not self._stopping:
            left_s = max(0.0, next_beat_s - time.monotonic())
            ready = dict(poller.poll(int(left_s * 1000) + 1))
            if self._bell_inside in ready:
                self._hear()
            self._send_queued()
            if self._questions in ready:
                self._answer_all()
            if time.monotonic() >= next_beat_s:
                self._send(self._log.beat())
                next_beat_s = time.monotonic() + self._heartbeat_s

    def _hear(self) -> None:
        # All rings before the look into the queue: a ring that comes later is heard in the next round.
        with contextlib.suppress(zmq.Again):
            while True:
                self._bell_inside.recv(zmq.NOBLOCK)

    def _send_queued(self) -> None:
        for _ in range(len(self._queue)):
            entry = self._queue.popleft()
            if isinstance(entry, Mapping):
                self.counters["epochs"] += 1
                self._send(self._log.begin(entry))
            else:
                self._send(self._log.add(entry))

    def _send(self, frames: Frames) -> None:
        self.counters["batches"] += 1
        self._events.send_multipart(frames)  # a PUB socket drops what a reader has no room for

    def _answer_all(self) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(QUESTIONS_PER_ROUND):
                self._answer(self._questions.recv_multipart(zmq.NOBLOCK))

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            self.counters["bad_questions"] += 1
            return
        peer, _, question = frames
        answer = self._log.answer(question)
        if answer is None:
            self.counters["bad_questions"] += 1
            return
        for message in answer:
            self._questions.send_multipart((peer, b"", *message))
