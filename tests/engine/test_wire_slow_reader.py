"""A client that does not read cannot grow the engine's memory, whatever it grants and asks for."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from engine.wire import messages as wire
from engine.wire.client import OUTPUT_CREDIT, RemoteEngine
from engine.wire.host import ASSET_READS, MAX_CREDIT
from engine.wire.peers import MERGE_AT_OUTPUTS
from tests.support.scripted_engine import scripted_process, scripted_tokens
from tests.support.until import until
from tests.support.wire_bench import Bench
from tests.support.wire_requests import request

ENDLESS = 1_000_000
LONG_ID_CHARACTERS = 8192
STEPS = 1000
GROWTH_LIMIT_BYTES = 160 << 20


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(f"ipc://{tmp_path}/e") as bench:
        bench.serve()
        yield bench


async def test_a_client_that_never_reads_leaves_the_engines_memory_as_it_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, zmq.Context() as context:
        listener.setblocking(False)
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        engine = RemoteEngine(address, watch_load=True)
        mute = context.socket(zmq.DEALER)
        mute.set(zmq.LINGER, 0)
        mute.set(zmq.RCVHWM, 1)
        with scripted_process(address, listen_fd=listener.fileno()) as process:
            try:
                engine.open()
                await engine.wait_ready()
                memory = psutil.Process(process.pid).memory_info
                before = memory().rss
                mute.connect(address)
                for message in (
                    wire.Hello(wire.WIRE_VERSION, OUTPUT_CREDIT),
                    wire.WatchLoad(1 << 62),
                    # Without its credit every step would leave half a megabyte behind.
                    *(wire.Submit(request(f"{n:0{LONG_ID_CHARACTERS}}", count=ENDLESS)) for n in range(64)),
                ):
                    mute.send(msgspec.msgpack.encode(message))
                await until(lambda: (load := engine.latest_load) is not None and load.running == 64, "all run")
                assert engine.latest_load is not None
                start = engine.latest_load.steps_total

                def has_gone_on() -> bool:
                    load = engine.latest_load
                    return load is not None and load.steps_total > start + STEPS

                await until(has_gone_on, "the engine goes on", limit_s=120)
                assert memory().rss - before < GROWTH_LIMIT_BYTES
            finally:
                mute.close(0)
                engine.close()


def test_a_client_that_grants_without_end_is_sent_a_bounded_number(bench: Bench) -> None:
    peer = bench.peer(credit=1 << 62)
    peer.received(wire.Status)
    peer.send(wire.Credit(1 << 62))
    peer.send(wire.Submit(request(count=ENDLESS)))
    bench.pump_until(lambda: bench.host.num_running == 1)
    bench.run_steps(MAX_CREDIT + 10)
    assert bench.host.num_held == 1
    assert len(peer.received(wire.Outputs, MAX_CREDIT)) == MAX_CREDIT


def test_what_waits_for_long_is_one_output(bench: Bench) -> None:
    peer = bench.welcomed(credit=1)
    count = 3 * MERGE_AT_OUTPUTS
    peer.send(wire.Submit(request(count=count)))
    bench.pump_until(lambda: bench.host.num_running == 1)
    bench.run_steps(count - 1)
    (held,) = [held for one in bench.host._peers.values() for held in one.pending.values()]
    assert len(held) < MERGE_AT_OUTPUTS
    bench.run_steps(1)
    peer.send(wire.Credit(1))
    tokens = [token for message in peer.received(wire.Outputs, 2) for token in message.batch[0].token_ids]
    assert tokens == scripted_tokens(1, count)


def test_assets_cannot_be_fetched_without_end(bench: Bench) -> None:
    peer, other = bench.welcomed(), bench.welcomed()
    (digest,) = bench.host._assets
    for call in range(4 * ASSET_READS):
        peer.send(wire.FetchAsset(call, digest, 0))
        answer = peer.received(wire.Reply)[0]
        if isinstance(answer, wire.ErrorReply):
            break
    assert isinstance(answer, wire.ErrorReply)
    assert answer.error.type == "PressureError"
    assert call >= ASSET_READS
    other.send(wire.FetchAsset(0, digest, 0))
    assert isinstance(other.received(wire.Reply)[0], wire.AssetReply)
