"""The client's end of the wire: `RemoteEngine` is an `Engine` whose work is done in another process.

Owns the connection and what is known of the engine's state; engine/wire/streams.py has the running requests, calls.py
the control calls, session.py the sockets. Lives on one asyncio (or uvloop) loop. The path of a token is one decoded
message per engine step, one deque and at most one future per request: no task, no lock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec
import zmq

from engine.errors import (
    ConfigError,
    EngineDiedError,
    EngineError,
    EngineSilentError,
    RequestError,
    UnsupportedError,
)
from engine.kv.store_orders import NewWeights, StoreAnswer, StoreOrder, WeightsEpoch
from engine.protocol import EngineInfo, EngineLoad, GenerateRequest, TokenOutput
from engine.wire import messages as wire
from engine.wire.calls import Calls
from engine.wire.curve import KeyPair, check_public_key, secure_client
from engine.wire.errors import from_wire
from engine.wire.load_watch import LOAD_CREDIT, LoadWatch
from engine.wire.remote_state import RemoteState
from engine.wire.session import Session, Socket
from engine.wire.streams import Stream, Streams
from kvstore.keys import token_words

OUTPUT_CREDIT = 64
"""Outputs messages that may be under way: enough for steps of a millisecond and a loop that stalls for 60 ms."""

REFUSED_RETRY_S = 1.0
REFUSED_MESSAGE = "The engine and this process do not accept each other's keys."

MAX_ASSET_BYTES = 256 * 1024 * 1024
"""The largest tokenizers have 40 MB."""


class RemoteEngine:
    """An engine at `address`. `open()` on the loop that uses it, `close()` at the end; it connects again by itself.

    With `keys`, our own, the connection is encrypted, and the engine must hold the secret of `server_key` (Z85).
    With `watch_load` the engine reports its load whenever it changes; `on_load` is then called with each report.
    `counters` are cumulative: malformed frames, outputs that came late or twice, connections lost, and given up.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: KeyPair | None = None,
        server_key: str | None = None,
        watch_load: bool = False,
        on_load: Callable[[EngineLoad], None] | None = None,
    ) -> None:
        self.address = address
        self.submits_sent = 0
        """Of this connection. `submits_reported` is how many of them the latest load report counts."""
        self.frames_received = 0
        """In all. With `watch_load` an engine that is ready sends ten a second and more, except within a step."""
        self.counters = {"malformed_frames": 0, "late_outputs": 0, "lost_connections": 0, "given_up": 0}
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(wire.EngineMessage).decode
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._session: Session | None = None
        self._state = RemoteState(message="Waiting for the engine's process.")
        self._changed = asyncio.Event()
        self._streams = Streams(self._send, self.counters)
        self._calls = Calls(self._send)
        self._owed_credit = 0
        if (keys is None) != (server_key is None):
            raise ConfigError("A secured connection needs both our own keys and the engine's public key.")
        self._secure: Callable[[Socket], None] | None = None
        if keys is not None and server_key is not None:
            server_key = check_public_key(server_key, f"the engine at {address}")
            self._secure = partial(secure_client, keys=keys, server_key=server_key)
        self._retry: asyncio.TimerHandle | None = None
        self._watch_load = watch_load
        self._load = LoadWatch(on_load)

    # --- life ---------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to connect. The engine need not be there yet."""
        if self._context is None:
            self._context = zmq.Context()
            self._connect()

    def close(self) -> None:
        """End every running request with EngineDiedError and release the sockets."""
        if self._context is None:
            return
        self._lose(EngineDiedError("The connection to the engine was closed."))
        if self._session is not None:
            self._session.close()
            self._session = None
        self._context.term()
        self._context = None
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def give_up(self, reason: str) -> None:
        """End every running request with EngineSilentError and begin anew, as if the connection had been lost.

        For an engine that is connected and does not answer. When it wakes it finds the old connection gone and ends its
        requests, and what it says on that one reaches nobody; it is ready here once it has answered on the new one.
        """
        if self._context is not None:
            self.counters["given_up"] += 1
            self._lose(EngineSilentError(reason))
            self._connect()

    @property
    def is_ready(self) -> bool:
        return self._state.state == "ready"

    @property
    def num_running(self) -> int:
        """Requests that the engine has not ended yet."""
        return len(self._streams)

    @property
    def latest_load(self) -> EngineLoad | None:
        """What the engine has reported last; None without `watch_load`, and from a lost connection to the next."""
        return self._load.latest

    @property
    def on_load(self) -> Callable[[EngineLoad], None] | None:
        """Called with each report, on the loop."""
        return self._load.on_load

    @on_load.setter
    def on_load(self, listener: Callable[[EngineLoad], None] | None) -> None:
        self._load.on_load = listener

    @property
    def load_age_s(self) -> float:
        """Seconds since the latest report came; infinite when there is none."""
        return self._load.age_s

    @property
    def host_counters(self) -> dict[str, int]:
        """What the engine's end of the wire has counted, over all its clients; empty when there is no report."""
        return self._load.counters

    @property
    def submits_reported(self) -> int:
        return self._load.submits

    def state(self) -> RemoteState:
        return self._state

    async def wait_ready(self) -> EngineInfo:
        """Return once the engine can serve; wait as long as it takes."""
        while self._state.state != "ready" or self._state.info is None:
            await self.wait_changed()
        return self._state.info

    async def wait_changed(self) -> RemoteState:
        """Return the next state that differs from the present one."""
        await self._changed.wait()
        return self._state

    # --- Engine -------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        stream = self._submit(request)
        ended = False
        try:
            while True:
                while stream.outputs:
                    output = stream.outputs.popleft()
                    ended = output.finish_reason is not None
                    yield output
                    if ended:
                        return
                if stream.error is not None:
                    ended = True
                    raise stream.error
                stream.waiter = asyncio.get_running_loop().create_future()
                await stream.waiter
        finally:
            if not ended:
                self._streams.abandon(request.request_id, stream)

    async def finish(self, request_id: str, keep_tokens: int) -> None:
        self._streams.end(request_id, wire.Finish(request_id, keep_tokens))

    async def abort(self, request_id: str) -> None:
        self._streams.end(request_id, wire.Abort(request_id))

    async def describe(self) -> EngineInfo:
        if self._state.info is None:
            raise self._state.refusal()
        return self._state.info

    async def fetch_asset(self, digest: str) -> bytes:
        data = bytearray()
        while True:
            reply = await self._call(wire.FetchAsset(self._calls.next_id(), digest, len(data)))
            if not isinstance(reply, wire.AssetReply):
                raise EngineError("The engine answered with something else than an asset.")
            data += reply.data
            if max(reply.size_bytes, len(data)) > MAX_ASSET_BYTES:
                raise EngineError(f"The asset is larger than {MAX_ASSET_BYTES} bytes.")
            if len(data) >= reply.size_bytes or not reply.data:
                return bytes(data)

    async def load(self) -> EngineLoad:
        reply = await self._call(wire.GetLoad(self._calls.next_id()))
        if not isinstance(reply, wire.LoadReply):
            raise EngineError("The engine answered with something else than its load.")
        return reply.load

    async def drain(self) -> None:
        await self._call(wire.Drain(self._calls.next_id()))

    # --- Admin --------------------------------------------------------------------------------------------------------

    async def reset_prefix_cache(self) -> None:
        await self._call(wire.ResetPrefixCache(self._calls.next_id()))

    async def abort_requests(self, request_id: str) -> int:
        reply = await self._call(wire.AbortRequests(self._calls.next_id(), request_id))
        if not isinstance(reply, wire.CountReply):
            raise EngineError("The engine answered with something else than a count.")
        return reply.count

    async def order_store(self, order: StoreOrder) -> StoreAnswer:
        info = self._state.info
        if info is not None and not info.kv_tiers:
            # Its engine may be of before these orders, and say nothing at all to one.
            if not isinstance(order, NewWeights):
                raise UnsupportedError("This engine has no KV store (--kv-store).", code="kv_store_off")
            await self.reset_prefix_cache()
            return WeightsEpoch(epoch="")
        reply = await self._call(wire.OrderStore(self._calls.next_id(), order))
        if not isinstance(reply, wire.StoreReply):
            raise EngineError("The engine answered with something else than its KV store's answer.")
        return reply.answer

    # --- requests -----------------------------------------------------------------------------------------------------

    def _submit(self, request: GenerateRequest) -> Stream:
        if self._state.state != "ready":
            raise self._state.refusal()
        self._streams.check(request)
        sent_unix_s = None if request.deadline_unix_s is None else time.time()
        promptless = msgspec.structs.replace(request, prompt_ids=[])
        frame = self._encode(wire.Submit(promptless, sent_unix_s, _prompt_words(request)))
        if len(frame) > wire.MAX_CLIENT_FRAME_BYTES:
            raise RequestError(f"The request is larger than {wire.MAX_CLIENT_FRAME_BYTES} bytes.", param="prompt")
        stream = self._streams.begin(request)
        self.submits_sent += 1
        self._send_frame(frame)
        return stream

    async def _call(self, message: wire.Call) -> wire.Reply:
        if self._state.state not in ("ready", "draining"):
            raise self._state.refusal()
        return await self._calls.ask(message)

    # --- the connection -----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._context is None:
            return
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._session is not None:
            self._session.close()
            self._session = None
        self._owed_credit = self.submits_sent = 0
        self._load.forget()
        try:
            self._session = Session(
                self._context,
                self.address,
                self._receive,
                self._caught_up,
                self._disconnected,
                self._refused,
                self._secure,
            )
        except zmq.ZMQError as error:
            # An address that nobody can have, or no descriptors left: the second may pass.
            self._retry = asyncio.get_running_loop().call_later(REFUSED_RETRY_S, self._connect)
            self._change(msgspec.structs.replace(self._state, message=f"It cannot be connected to: {error.strerror}."))
            return
        self._send(wire.Hello(wire.WIRE_VERSION, OUTPUT_CREDIT))
        if self._watch_load:
            self._send(wire.WatchLoad(LOAD_CREDIT))

    def _disconnected(self) -> None:
        self.counters["lost_connections"] += 1
        self._lose(EngineDiedError("The connection to the engine was lost."))
        self._connect()

    def _refused(self, is_final: bool) -> None:
        """Something is there that we cannot speak to. The keys that it accepts may change, so we try again."""
        if is_final and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(REFUSED_RETRY_S, self._connect)
        # Without keys, and not refused for good, it may just have ended while the two shook hands.
        if is_final or self._secure is not None:
            state = msgspec.structs.replace(self._state, message=REFUSED_MESSAGE)
            if state != self._state:
                self._change(state)

    def _lose(self, died: EngineDiedError) -> None:
        self._streams.fail(died)
        self._calls.fail(died)
        self._load.forget()
        error = self._state.error
        self._change(RemoteState(state="dead", message=str(error or died), error=error))

    def _change(self, state: RemoteState) -> None:
        self._state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _send(self, message: wire.ClientMessage) -> None:
        self._send_frame(self._encode(message))

    def _send_frame(self, frame: bytes) -> None:
        if self._session is not None:
            self._session.send(frame)

    def _receive(self, frame: bytes) -> None:
        self.frames_received += 1
        try:
            message = self._decode(frame)
        except (ValueError, msgspec.MsgspecError, RecursionError):
            self.counters["malformed_frames"] += 1
            return
        if type(message) is wire.Outputs:
            self._owed_credit += 1
            self._streams.deliver(message.batch)
        else:
            self._receive_control(message)

    def _caught_up(self) -> None:
        """Everything that had arrived is handled: grant what was used, in few messages."""
        if self._owed_credit >= OUTPUT_CREDIT // 4:
            self._send(wire.Credit(self._owed_credit))
            self._owed_credit = 0
        if credit := self._load.take_credit():
            self._send(wire.WatchLoad(credit))

    def _receive_control(self, message: wire.EngineMessage) -> None:
        match message:
            case wire.Refused(request_id, attempt, error):
                self._streams.refuse(request_id, attempt, from_wire(error))
            case wire.Welcome(_, incarnation):
                self._change(RemoteState(message="The model is loading.", incarnation=incarnation))
            case wire.Status():
                self._receive_status(message)
            case wire.VersionRefused(engine_version, client_version):
                text = f"The engine speaks version {engine_version} of the wire, this process version {client_version}."
                self._change(RemoteState(state="failed", message=text, error=EngineError(text)))
            case wire.Bye():
                self._disconnected()
            case wire.LoadReport():
                self._load.take(message)
            case wire.Outputs():
                pass
            case reply:
                self._receive_reply(reply)

    def _receive_status(self, status: wire.Status) -> None:
        before = self._state
        if status.state == "ready" and before.info is None:
            # Ready is what can be described: the answer completes the change.
            self._send(wire.Describe(0))
            return
        state = msgspec.structs.replace(
            before,
            state=status.state,
            progress=status.progress,
            message=status.message,
            error=None if status.error is None else from_wire(status.error),
        )
        if state != before:
            self._change(state)

    def _receive_reply(self, reply: wire.Reply) -> None:
        if isinstance(reply, wire.InfoReply) and reply.call_id == 0:
            if self._state.info is None:
                ready = RemoteState(state="ready", progress=1.0, incarnation=reply.info.incarnation, info=reply.info)
                self._change(ready)
        else:
            self._calls.answer(reply)


def _prompt_words(request: GenerateRequest) -> bytes:
    try:
        return token_words(request.prompt_ids)
    except (OverflowError, TypeError) as error:
        raise RequestError("prompt has a token id that is not an unsigned 32-bit integer", param="prompt") from error
