"""The engine's end of the wire, for a single-threaded loop: `pump()` between steps, `send_outputs()` after each.

Owns the ROUTER socket and the peers. It binds before the model is loaded, so that clients learn how far loading is.
It knows of the engine only `Core`. No call waits for a peer: whatever a peer cannot take now is held for it, merged per
request, and a peer that is gone has its requests aborted.
"""

from __future__ import annotations

import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from engine.errors import (
    ConfigError,
    DrainingError,
    HeadraceError,
    LoadingError,
    PressureError,
    RequestError,
    RequestFailedError,
    UnsupportedError,
)
from engine.kv.store_orders import NewWeights, StoreAnswer, StoreOrder, WeightsEpoch
from engine.protocol import EngineInfo, EngineLoad, GenerateRequest, TokenOutput
from engine.wire import messages as wire
from engine.wire.curve import KeyGate, KeyPair, Socket
from engine.wire.errors import to_wire
from engine.wire.load_reports import LoadReports
from engine.wire.peers import Peer, Route, Routes
from engine.wire.waker import Waker
from kvstore.keys import tokens_of_words
from kvstore.manager.figures import StoreStats

log = logging.getLogger(__name__)

MAX_MESSAGES_PER_PUMP = 1024
"""A flood of messages may not keep the engine from its next step."""

UNREAD_LIMIT_MESSAGES = 10_000
"""A peer that leaves so many unread is given up. Outputs stop at the end of its credit, so replies alone get there."""

UNHANDLED_LIMIT_MESSAGES = 65_536
"""Of one peer. Beyond it ZeroMQ stops reading, heartbeats too, and takes a peer that waits for a long step for dead. A
client has at most 16,384 requests and a few messages for each."""

HELD_LIMIT_REQUESTS = 32_768
"""Of one peer: those that run, and those that ended but wait with their outputs for its credit. A client that grants
credit has at most half as many."""

MAX_CREDIT = 1024
"""Whatever a peer grants, no more Outputs than these can lie unread."""

MAX_PEERS = 4096

ASSET_READS = 16
"""How often one connection may fetch everything that there is: what lies unread is bounded by it."""

PROBE_INTERVAL_S = 0.5
"""ZeroMQ does not say when a peer leaves; sending to it does."""


class Core(Protocol):
    """What the host needs of the engine. Request ids are the host's own. Every call returns at once."""

    def submit(self, request: GenerateRequest) -> None:
        """Take a request or raise an error of the tree."""
        ...

    def finish(self, request_id: str, keep_tokens: int) -> object: ...

    def abort(self, request_id: str) -> object: ...

    def load(self) -> EngineLoad: ...

    def drain(self) -> None: ...

    def reset_prefix_cache(self) -> None: ...


class StoreOrders(Protocol):
    """Where orders to the KV store are carried out (engine/kv/store_desk.py). Every call returns at once."""

    @property
    def stats(self) -> StoreStats: ...

    def begin(self, ticket: object, order: StoreOrder) -> None:
        """Take an order or raise an error of the tree."""
        ...

    def take(self) -> Sequence[tuple[object, StoreAnswer | HeadraceError]]:
        """Return the answers that have come, each with its ticket."""
        ...


class WireHost:
    """`counters` are cumulative: malformed frames, peers that vanished, outputs that were merged for a slow peer.

    With `keys` only clients get in that `clients_file` lists, or that hold the same keys. `listen_fd` is a socket that
    listens at `address` already. `context` and `secure` are for other sockets of this process that serve the same
    clients. Raises ConfigError when the address cannot be had or a file cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        listen_fd: int | None = None,
        keys: KeyPair | None = None,
        clients_file: Path | None = None,
    ) -> None:
        self.incarnation = uuid.uuid4().hex
        self.counters = {"malformed_frames": 0, "vanished_peers": 0, "held_outputs": 0}
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = None if keys is None else KeyGate(self.context, keys, clients_file)
        self._socket = self.context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.MAXMSGSIZE, wire.MAX_CLIENT_FRAME_BYTES)
        self._socket.set(zmq.RCVHWM, UNHANDLED_LIMIT_MESSAGES)
        self._socket.set(zmq.SNDHWM, UNREAD_LIMIT_MESSAGES)
        self._socket.set(zmq.HEARTBEAT_IVL, wire.HEARTBEAT_INTERVAL_MS)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, wire.HEARTBEAT_TIMEOUT_MS)
        self._socket.set(zmq.LINGER, 1_000)
        self._bind(address, listen_fd)
        self.address: str = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(wire.ClientMessage).decode
        self._peers: dict[bytes, Peer] = {}
        self._met_peers = 0
        self._routes = Routes()
        self._status = wire.Status("loading")
        self._next_probe = 0.0
        self._reports = LoadReports()
        self._core: Core | None = None
        self._store: StoreOrders | None = None
        self._info: EngineInfo | None = None
        self._assets: Mapping[str, bytes] = {}
        self._waker: Waker | None = None
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def _bind(self, address: str, listen_fd: int | None) -> None:
        if self.secure is not None:
            self.secure(self._socket)
        if listen_fd is not None:
            self._socket.set(zmq.USE_FD, listen_fd)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"Cannot listen on {address}: {error.strerror}.") from None

    @property
    def secure(self) -> Callable[[Socket], None] | None:
        """Prepares a socket of `context` to let in the same clients, before it is bound; None when anybody may."""
        return None if self._gate is None else self._gate.secure

    @property
    def num_refused(self) -> int:
        """Handshakes of clients whose key is not known."""
        return 0 if self._gate is None else self._gate.refused

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    @property
    def num_running(self) -> int:
        return len(self._routes)

    @property
    def num_held(self) -> int:
        """Requests with outputs that wait for their peer's credit."""
        return sum(len(peer.pending) for peer in self._peers.values())

    def set_status(self, status: wire.Status) -> None:
        """Tell every peer, now and when it connects."""
        self._reports.note_change()
        self._status = status
        self._broadcast(status)

    def serve(
        self,
        core: Core,
        info: EngineInfo,
        assets: Mapping[str, bytes],
        waker: Waker | None = None,
        store: StoreOrders | None = None,
    ) -> None:
        """The engine can serve: `assets` are the bytes of `info.text` by digest. A `waker` ends the wait of `pump`,
        also when `store` has answers."""
        if waker is not None:
            self._waker = waker
            self._poller.register(waker.fd, zmq.POLLIN)
        self._core, self._assets, self._store = core, assets, store
        self._info = msgspec.structs.replace(info, incarnation=self.incarnation, pid=os.getpid())
        self.set_status(wire.Status("ready", 1.0))

    def drain(self) -> None:
        """Take nothing new, and say so."""
        if self._core is not None and self._status.state == "ready":
            self._core.drain()
            self.set_status(wire.Status("draining", 1.0))

    def pump(self, timeout_s: float = 0.0) -> None:
        """Handle what has arrived; wait for the first message, or to be woken, at most `timeout_s`."""
        ready = dict(self._poller.poll(self._patience_ms(timeout_s)))
        if self._waker is not None and self._waker.fd in ready:
            self._waker.clear()
        if self._socket in ready:
            for _ in range(MAX_MESSAGES_PER_PUMP):
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._receive(frames)
        if self._store is not None:
            self._send_store_answers(self._store.take())
        now = time.monotonic()
        if now >= self._next_probe:
            self._next_probe = now + PROBE_INTERVAL_S
            self._broadcast(self._status)
        if self._core is not None and self._reports.due_in_s(now) <= 0.0:
            self._report_load(self._load(self._core), now)

    def send_outputs(self, outputs: Sequence[TokenOutput]) -> None:
        """Send one step's outputs, one message per peer; hold them for peers without credit."""
        self._reports.note_change()
        batches: dict[bytes, list[TokenOutput]] = {}
        for route, output in self._routes.translate(outputs):
            peer = route.peer
            if peer.credit > 0 and not peer.pending:
                batches.setdefault(peer.identity, []).append(output)
            else:
                self.counters["held_outputs"] += 1
                peer.hold(route, output)
        for identity, batch in batches.items():
            if still_there := self._peers.get(identity):
                self._send_batch(still_there, batch)

    def _patience_ms(self, timeout_s: float) -> int:
        """How long to wait for a message before something else is to be done: in whole milliseconds, rounded up, for a
        wait that ends too early would be repeated with nothing to do."""
        if self._core is not None:
            timeout_s = min(timeout_s, self._reports.due_in_s(time.monotonic()))
        return math.ceil(timeout_s * 1000)

    def _load(self, core: Core) -> EngineLoad:
        load = core.load()
        return load if self._store is None else msgspec.structs.replace(load, kv_store=self._store.stats)

    def _report_load(self, load: EngineLoad, now: float) -> None:
        counters = {**self.counters, "refused_keys": self.num_refused}
        for peer in self._reports.take_due(now):
            peer.load_credit -= 1
            self._send(peer, wire.LoadReport(peer.submits, load, counters))

    def close(self) -> None:
        """Give unsent messages a second to leave, then close."""
        self._socket.close()
        self.context.term()

    def _receive(self, frames: list[bytes]) -> None:
        try:
            identity, frame = frames
            message = self._decode(frame)
        except (ValueError, msgspec.MsgspecError, RecursionError):  # the last for arrays nested a million deep
            self.counters["malformed_frames"] += 1
            return
        if isinstance(message, wire.Hello):
            self._greet(identity, message)
            return
        peer = self._peers.get(identity)
        if peer is None:
            self._send_to(identity, wire.Bye())
        else:
            self._handle(peer, message)

    def _greet(self, identity: bytes, hello: wire.Hello) -> None:
        if identity in self._peers:
            self._forget(self._peers[identity])
        if hello.version != wire.WIRE_VERSION:
            self._send_to(identity, wire.VersionRefused(wire.WIRE_VERSION, hello.version))
            return
        if len(self._peers) >= MAX_PEERS:
            log.warning("%d clients are connected already: another one was refused", MAX_PEERS)
            return
        self._met_peers += 1
        self._peers[identity] = Peer(identity, self._met_peers, min(max(1, hello.credit), MAX_CREDIT))
        self._send_to(identity, wire.Welcome(wire.WIRE_VERSION, self.incarnation))
        self._send_to(identity, self._status)

    def _handle(self, peer: Peer, message: wire.ClientMessage) -> None:
        match message:
            case wire.Credit(count):
                peer.credit = min(peer.credit + max(0, count), MAX_CREDIT)
                self._flush(peer)
            case wire.WatchLoad(count):
                peer.load_credit = min(peer.load_credit + max(0, count), MAX_CREDIT)
                self._reports.watch(peer)
            case wire.Submit(request, sent_unix_s, prompt):
                peer.submits += 1
                self._submit(peer, _in_own_time(request, sent_unix_s), prompt)
                self._reports.note_change()
            case wire.Finish(request_id, keep_tokens):
                if self._core is not None and (route := peer.running.get(request_id)):
                    self._core.finish(route.key, keep_tokens)
            case wire.Abort(request_id):
                if route := peer.running.get(request_id):
                    self._abort(route)
            case wire.Hello():
                pass
            case call:
                reply = self._answer(peer, call)
                if reply is not None:
                    self._send(peer, reply)

    def _submit(self, peer: Peer, request: GenerateRequest, prompt: bytes) -> None:
        try:
            if prompt:
                request = _with_prompt(request, prompt)
            core = self._ready_core()
            if len(peer.running) + len(peer.pending) >= HELD_LIMIT_REQUESTS:
                raise PressureError(f"{HELD_LIMIT_REQUESTS} requests of this peer are running or wait for its credit.")
            if request.request_id in peer.running:
                raise RequestError(f"Request {request.request_id} is running already.", param="request_id")
            route, renamed = self._routes.open(peer, request)
            try:
                core.submit(renamed)
            except BaseException:
                self._routes.close(route)
                raise
        except HeadraceError as error:
            self._send(peer, wire.Refused(request.request_id, request.attempt, to_wire(error)))
        except Exception:
            # One request's input must never end the loop, whatever the engine's checks have missed.
            log.exception("request %s failed at the door", request.request_id)
            failed = RequestFailedError("The engine failed to take the request.")
            self._send(peer, wire.Refused(request.request_id, request.attempt, to_wire(failed)))

    def _ready_core(self) -> Core:
        if self._status.state == "draining":
            raise DrainingError("The engine is shutting down.")
        if self._core is None:
            raise LoadingError(self._status.message or "The model is loading.", progress=self._status.progress)
        return self._core

    def _abort(self, route: Route, error: str | None = None, error_code: str | None = None) -> None:
        """End it for the peer at once: its terminal output does not wait for the step that is under way."""
        self._routes.close(route)
        if self._core is not None:
            self._core.abort(route.key)
        last = TokenOutput(
            route.request_id, route.attempt, route.next_offset, [], "abort", error=error, error_code=error_code
        )
        route.peer.hold(route, last)
        self._flush(route.peer)

    def _abort_for_operator(self, request_id: str) -> int:
        choices = request_id + "-"
        found = [
            route
            for peer in self._peers.values()
            for name, route in peer.running.items()
            if name == request_id or name.startswith(choices)
        ]
        for route in found:
            self._abort(route, "The request was ended by an operator.", "aborted_by_operator")
        return len(found)

    def _read_asset(self, peer: Peer, call: wire.FetchAsset) -> wire.AssetReply:
        data = self._assets.get(call.digest)
        if data is None:
            raise RequestError(f"There is no asset {call.digest}.", param="digest", value=call.digest)
        if peer.asset_bytes > ASSET_READS * sum(map(len, self._assets.values())):
            raise PressureError("This connection has fetched all assets many times.")
        start = max(0, call.offset)
        chunk = data[start : start + wire.ASSET_CHUNK_BYTES]
        peer.asset_bytes += len(chunk)
        return wire.AssetReply(call.call_id, len(data), chunk)

    def _order_store(self, peer: Peer, call: wire.OrderStore, core: Core) -> wire.Reply | None:
        is_new = isinstance(call.order, NewWeights)
        if self._store is None and not is_new:
            raise UnsupportedError("This engine has no KV store (--kv-store).", code="kv_store_off")
        if self._store is not None:
            self._store.begin((peer.identity, call.call_id), call.order)
        if is_new:
            core.reset_prefix_cache()
        return None if self._store is not None else wire.StoreReply(call.call_id, WeightsEpoch(epoch=""))

    def _send_store_answers(self, answers: Sequence[tuple[object, StoreAnswer | HeadraceError]]) -> None:
        for ticket, answer in answers:
            assert isinstance(ticket, tuple), "tickets are made above"
            identity, call_id = ticket
            if isinstance(answer, HeadraceError):
                self._send_to(identity, wire.ErrorReply(call_id, to_wire(answer)))
            else:
                self._send_to(identity, wire.StoreReply(call_id, answer))

    def _answer(self, peer: Peer, call: wire.Call) -> wire.Reply | None:
        """Return the answer, None for one that comes later."""
        try:
            match call:
                case wire.FetchAsset():
                    return self._read_asset(peer, call)
                case _ if self._core is None or self._info is None:
                    raise LoadingError(self._status.message or "The model is loading.", progress=self._status.progress)
                case wire.Describe(call_id):
                    return wire.InfoReply(call_id, self._info)
                case wire.GetLoad(call_id):
                    return wire.LoadReply(call_id, self._load(self._core))
                case wire.Drain(call_id):
                    self.drain()
                    return wire.DoneReply(call_id)
                case wire.ResetPrefixCache(call_id):
                    self._core.reset_prefix_cache()
                    return wire.DoneReply(call_id)
                case wire.AbortRequests(call_id, request_id):
                    return wire.CountReply(call_id, self._abort_for_operator(request_id))
                case wire.OrderStore():
                    return self._order_store(peer, call, self._core)
        except HeadraceError as error:
            return wire.ErrorReply(call.call_id, to_wire(error))

    def _flush(self, peer: Peer) -> None:
        if peer.pending and peer.credit > 0:
            self._send_batch(peer, peer.take_pending())

    def _send_batch(self, peer: Peer, batch: list[TokenOutput]) -> None:
        frame = self._encode(wire.Outputs(batch))
        if len(frame) <= wire.MAX_ENGINE_FRAME_BYTES:
            peer.credit -= 1
            self._send_frame(peer.identity, frame)
        elif len(batch) > 1:
            for output in batch:
                self._send_batch(peer, [output])
        else:
            self._send_batch(peer, [self._too_large(peer, batch[0])])

    def _too_large(self, peer: Peer, output: TokenOutput) -> TokenOutput:
        """Fail a request whose output no frame holds (logprobs of a giant prompt), and nothing else."""
        route = peer.running.get(output.request_id)
        if route is not None and route.attempt == output.attempt:
            self._routes.close(route)
            if self._core is not None:
                self._core.abort(route.key)
        message = f"The output is larger than {wire.MAX_ENGINE_FRAME_BYTES} bytes; ask for fewer logprobs."
        return TokenOutput(
            output.request_id, output.attempt, output.offset, [], "error", error=message, error_code="output_too_large"
        )

    def _broadcast(self, message: wire.EngineMessage) -> None:
        frame = self._encode(message)
        for identity in list(self._peers):
            self._send_frame(identity, frame)

    def _send(self, peer: Peer, message: wire.EngineMessage) -> None:
        self._send_frame(peer.identity, self._encode(message))

    def _send_to(self, identity: bytes, message: wire.EngineMessage) -> None:
        self._send_frame(identity, self._encode(message))

    def _send_frame(self, identity: bytes, frame: bytes) -> None:
        try:
            self._socket.send_multipart((identity, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # EHOSTUNREACH: it left. EAGAIN: it has not read for thousands of messages.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if peer := self._peers.get(identity):
                self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.identity]
        self._reports.forget(peer)
        self.counters["vanished_peers"] += 1
        peer.pending.clear()
        for route in list(peer.running.values()):
            self._routes.close(route)
            if self._core is not None:
                self._core.abort(route.key)


def _in_own_time(request: GenerateRequest, sent_unix_s: float | None) -> GenerateRequest:
    """Return the request with its deadline in this host's time, where the peer has told its own."""
    if request.deadline_unix_s is None or sent_unix_s is None:
        return request
    left_s = request.deadline_unix_s - sent_unix_s
    return msgspec.structs.replace(request, deadline_unix_s=time.time() + left_s)


def _with_prompt(request: GenerateRequest, words: bytes) -> GenerateRequest:
    try:
        return msgspec.structs.replace(request, prompt_ids=tokens_of_words(words))
    except ValueError as error:
        raise RequestError("prompt ends within a token id", param="prompt") from error
