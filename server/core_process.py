"""The engine's process: bind the wire, load the model, then pump, step, send until told to stop.

Started with one JSON line on stdin (or the path of a file that holds it): a CoreSpec. The step never waits for text,
HTTP or JSON. Exit codes: 0 stopped by SIGTERM, 2 the model or a setting is wrong (clients got the reason as the
"failed" status), anything else is a fault, and the launcher starts another.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

import msgspec
import zmq

from engine.config import EngineConfig
from engine.errors import ConfigError, HeadraceError, ModelError
from engine.kv.event_log import KVEventLog
from engine.protocol import EngineInfo, TokenOutput
from engine.wire.curve import KeyPair, Socket
from engine.wire.errors import to_wire
from engine.wire.host import Core, StoreOrders, WireHost
from engine.wire.messages import Status
from engine.wire.waker import Waker
from kvstore.events.publisher import EventPublisher
from server.logs import LogFormat, configure

IDLE_WAIT_S = 0.1
"""How long an idle loop sleeps at most before it looks for a signal."""

STALLED_WAIT_S = 0.001
"""How long the loop pauses when all requests wait for something outside of the engine."""

FAREWELL_S = 1.0
"""How long a failed engine stays to tell the reason, once somebody listens: clients look for an engine several times a
second."""

LONELY_FAREWELL_S = 15.0
"""How long it waits for somebody: on a machine that is too busy for its clients the reason must not be lost."""


class WireSecurity(msgspec.Struct, frozen=True, kw_only=True):
    """Files (engine/wire/curve.py): the engine's own key pair, and the public keys of the clients that it lets in."""

    key_file: str
    clients_file: str | None = None


class CoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is started with. Without `events_address` no KV events are published. A file descriptor is of an
    inherited socket that listens at the address already.
    """

    config: EngineConfig
    address: str
    listen_fd: int | None = None
    events_address: str | None = None
    events_fd: int | None = None
    events_replay_address: str | None = None
    events_replay_fd: int | None = None
    dp_rank: int | None = None
    security: WireSecurity | None = None
    drain_timeout_s: float = 30.0
    log_level: str = "info"
    log_format: LogFormat = "text"


class SteppedCore(Core, Protocol):
    """The engine as its loop sees it."""

    @property
    def has_work(self) -> bool: ...

    @property
    def made_progress(self) -> bool:
        """False when the last step found everything waiting for something outside of the engine."""
        ...

    def step(self) -> Sequence[TokenOutput]:
        """Do one step, or collect one; return the outputs that are new."""
        ...


def _nothing() -> None:
    """What an engine without threads and memory of its own has to close."""


class LoadedEngine(msgspec.Struct, frozen=True):
    """`assets` are the bytes of `info.text` by digest. `event_log` is the core's, where it has one. `waker` is woken
    when work can go on that waited for something outside of the engine. `store` takes orders to the KV store. `close`
    ends what the core was given, after its last step."""

    core: SteppedCore
    info: EngineInfo
    assets: Mapping[str, bytes]
    event_log: KVEventLog | None = None
    waker: Waker | None = None
    store: StoreOrders | None = None
    close: Callable[[], None] = _nothing


OnProgress = Callable[[float, str], None]
Load = Callable[[EngineConfig, OnProgress], LoadedEngine]


def run(spec: CoreSpec, load: Load) -> int:
    """Serve the engine that `load` returns until SIGTERM; return the exit code."""
    configure(spec.log_level, spec.log_format)
    # Bound before anything is imported or read, so that clients see the loading from its beginning.
    try:
        host = _open_host(spec)
    except ConfigError as error:
        logging.getLogger(__name__).error("%s", error)
        return 2
    try:
        engine = load(spec.config, lambda progress, message: _tell_progress(host, progress, message))
        # What loading has left is here to stay: a full collection would walk through all of it, between two tokens.
        gc.collect()
        gc.freeze()
        with closing(engine), _publishing(spec, host, engine) as publish_events:
            host.serve(engine.core, engine.info, engine.assets, engine.waker, engine.store)
            _serve(host, engine.core, spec.drain_timeout_s, publish_events)
        return 0
    except (ModelError, ConfigError) as error:
        _tell_failure(host, error)
        return 2
    finally:
        host.close()


def _open_host(spec: CoreSpec) -> WireHost:
    security = spec.security
    if security is None:
        return WireHost(spec.address, listen_fd=spec.listen_fd)
    return WireHost(
        spec.address,
        listen_fd=spec.listen_fd,
        keys=KeyPair.read(Path(security.key_file)),
        clients_file=None if security.clients_file is None else Path(security.clients_file),
    )


@contextmanager
def _publishing(spec: CoreSpec, host: WireHost, engine: LoadedEngine) -> Iterator[Callable[[], None]]:
    """Yield what publishes the KV events since it was last called. It never waits. Events carry token ids, so they go
    to whom the wire lets in, and to nobody else."""
    log = engine.event_log
    if log is None or spec.events_address is None or spec.events_replay_address is None:
        yield lambda: None
        return
    log.enabled = True

    def prepare(socket: Socket) -> None:
        if host.secure is not None:
            host.secure(socket)
        listen_fd = spec.events_fd if socket.type == zmq.PUB else spec.events_replay_fd
        if listen_fd is not None:
            socket.set(zmq.USE_FD, listen_fd)

    publisher = EventPublisher(
        spec.events_address,
        spec.events_replay_address,
        log.content,
        dp_rank=spec.dp_rank,
        context=host.context,
        secure=prepare,
    )
    try:
        yield lambda: publisher.publish(log.take())
    finally:
        publisher.close()


def _serve(host: WireHost, core: SteppedCore, drain_timeout_s: float, publish_events: Callable[[], None]) -> None:
    stop = _StopSignal()
    wait_s = IDLE_WAIT_S
    while True:
        host.pump(wait_s)
        if core.has_work:
            host.send_outputs(core.step())
        publish_events()
        wait_s = IDLE_WAIT_S if not core.has_work else 0.0 if core.made_progress else STALLED_WAIT_S
        if stop.requested:
            host.drain()
            is_drained = not core.has_work and not host.num_held
            if is_drained or time.monotonic() > stop.requested_at_s + drain_timeout_s:
                return


class _StopSignal:
    """SIGTERM asks, a second one ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        self.requested_at_s = 0.0
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, _signal: int, _frame: FrameType | None) -> None:
        self.requested = True
        self.requested_at_s = time.monotonic()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _tell_progress(host: WireHost, progress: float, message: str) -> None:
    host.set_status(Status("loading", progress, message))
    host.pump()


def _tell_failure(host: WireHost, error: HeadraceError) -> None:
    host.set_status(Status("failed", 0.0, str(error), to_wire(error)))
    # Who connects only now is told by the greeting.
    _pump_until(host, time.monotonic() + LONELY_FAREWELL_S, lambda: host.num_peers > 0)
    _pump_until(host, time.monotonic() + FAREWELL_S, lambda: False)


def _pump_until(host: WireHost, end_s: float, is_done: Callable[[], bool]) -> None:
    while not is_done() and time.monotonic() < end_s:
        host.pump(IDLE_WAIT_S)


def read_spec(arguments: Sequence[str]) -> CoreSpec:
    """Read the spec from the file that the first argument names, or from stdin's first line."""
    text = Path(arguments[0]).read_bytes() if arguments else sys.stdin.buffer.readline()
    return msgspec.json.decode(text, type=CoreSpec)


def load_engine(config: EngineConfig, on_progress: OnProgress) -> LoadedEngine:
    """Load the model; torch is imported here and not before."""
    on_progress(0.0, "Starting.")
    from engine.core import EngineCore
    from engine.grammar.pool import GrammarPool
    from engine.kv.open_store import open_store, tiers_of
    from engine.kv.store_desk import StoreDesk
    from engine.runner.build import build_engine
    from engine.runner.kv_memory import KVMemory
    from engine.text.tokenizer import TextCodec

    warming: list[tuple[GrammarPool, Future[None]]] = []

    def on_text(codec: TextCodec, vocab_size: int, eos_ids: Sequence[int]) -> None:
        pool = GrammarPool.of(codec, vocab_size, eos_ids)
        warming.append((pool, pool.warm_up()))

    info, runner, num_blocks, assets = build_engine(config, on_progress, on_text)
    ((grammars, warm_up),) = warming
    warm_up.result()  # Reading the weights took longer.
    log = KVEventLog([group.window_tokens for group in info.kv_groups], info.block_size)
    waker = Waker()
    store = open_store(config, info, KVMemory(runner.cache, info.kv_groups), waker.wake) if config.kv_store else None
    port = None if store is None else store.port
    core = EngineCore(info, config, runner, num_blocks, port, grammars=grammars, event_log=log)
    desk = None
    if store is not None:
        info = msgspec.structs.replace(info, kv_tiers=tiers_of(store))
        if store.tier_blocks is not None:
            log.follow(store.tier_blocks)
        desk = StoreDesk(store, core.cached_blocks, waker.wake)

    def close() -> None:
        if desk is not None:
            desk.close()
        if store is not None:
            store.close()
        waker.close()
        grammars.close()
        runner.close()

    return LoadedEngine(core, info, assets, log, waker, desk, close)


if __name__ == "__main__":
    sys.exit(run(read_spec(sys.argv[1:]), load_engine))
