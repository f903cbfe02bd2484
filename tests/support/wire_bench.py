"""A wire host with a scripted engine, stepped by hand, and clients that do only what they are told."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

import msgspec
import zmq

from engine.config import EngineConfig
from engine.wire import messages as wire
from engine.wire.host import WireHost
from tests.support.scripted_engine import ScriptedCore, scripted_info


class RawPeer:
    """A client that does only what it is told."""

    def __init__(self, host: WireHost, credit: int = 1000, version: int = wire.WIRE_VERSION) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.connect(host.address)
        self.host = host
        self.send(wire.Hello(version, credit))

    def send(self, message: wire.ClientMessage) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def received(self, kind: type[Any], count: int = 1) -> list[Any]:
        """Pump the host until `count` messages of this kind have come; all others are dropped."""
        found: list[Any] = []
        end = time.monotonic() + 20
        while len(found) < count:
            assert time.monotonic() < end, f"no {kind.__name__} came"
            self.host.pump(0.005)
            found += self.waiting(kind)
        return found

    def waiting(self, kind: type[Any]) -> list[Any]:
        """Return what of this kind is there already."""
        found = []
        while self.socket.poll(0):
            message = msgspec.msgpack.decode(self.socket.recv(), type=wire.EngineMessage)
            if isinstance(message, kind):
                found.append(message)
        return found

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


class Bench:
    """A host with a scripted engine in this process, stepped by hand."""

    def __init__(self, address: str, **options: Any) -> None:  # noqa: ANN401
        self.host = WireHost(address, **options)
        self.core = ScriptedCore(EngineConfig(max_model_len=4096, max_running=4096))
        self.peers: list[RawPeer] = []

    def serve(self) -> None:
        info = scripted_info(EngineConfig())
        self.host.serve(self.core, info, {info.text.tokenizer.digest: b"x" * (2 * wire.ASSET_CHUNK_BYTES + 1)})

    def peer(self, credit: int = 1000, version: int = wire.WIRE_VERSION) -> RawPeer:
        peer = RawPeer(self.host, credit, version)
        self.peers.append(peer)
        return peer

    def welcomed(self, credit: int = 1000) -> RawPeer:
        peer = self.peer(credit)
        peer.received(wire.Status)
        return peer

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.host.pump()
            self.host.send_outputs(self.core.step())

    def pump_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end
            self.host.pump(0.005)

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
