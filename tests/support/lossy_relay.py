"""A link that loses messages: forwards what is published, but not all of it."""

from __future__ import annotations

import random
import secrets
import threading
from types import TracebackType

import zmq


class LossyRelay:
    """Subscribes at `upstream` and publishes at `address`; drops one in `one_in`, by `seed`. `dropped` counts."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], upstream: str, one_in: int, seed: int = 0) -> None:
        self.dropped = self.passed = 0
        self._one_in, self._rng = one_in, random.Random(seed)
        self._sub = context.socket(zmq.SUB)
        self._sub.set(zmq.SUBSCRIBE, b"")
        self._sub.set(zmq.RCVHWM, 0)
        self._sub.connect(upstream)
        self._pub = context.socket(zmq.PUB)
        self.address = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        name = f"inproc://stop-{secrets.token_hex(8)}"
        self._stop, self._stopped = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._stopped.bind(name)
        self._stop.connect(name)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> LossyRelay:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.send(b"")
        self._thread.join(10)
        for socket in (self._sub, self._pub, self._stop, self._stopped):
            socket.close(0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._sub, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while self._stopped not in dict(poller.poll()):
            frames = self._sub.recv_multipart()
            if self._rng.randrange(self._one_in) == 0:
                self.dropped += 1
            else:
                self.passed += 1
                self._pub.send_multipart(frames)
