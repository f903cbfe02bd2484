"""`RemoteEngine` against an engine that says what it is told to: duplicates, holes, noise, other versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from engine.config import EngineConfig
from engine.errors import EngineDiedError, EngineError, RequestFailedError
from engine.protocol import EngineLoad, TokenOutput
from engine.wire import client as engine_client
from engine.wire import messages as wire
from engine.wire.client import RemoteEngine
from tests.support.scripted_engine import scripted_info
from tests.support.until import until
from tests.support.wire_requests import collect, request


class RawHost:
    """An engine that says what it is told to."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(address)
        self.peer = b""
        self.heard: list[wire.ClientMessage] = []

    async def received(self, kind: type[Any]) -> Any:  # noqa: ANN401
        found: list[Any] = []

        def look() -> bool:
            while self._socket.poll(0):
                self.peer, frame = self._socket.recv_multipart()
                message = msgspec.msgpack.decode(frame, type=wire.ClientMessage)
                self.heard.append(message)
                if isinstance(message, kind):
                    found.append(message)
            return bool(found)

        await until(look, f"a {kind.__name__} came")
        return found[-1]

    def send(self, *messages: wire.EngineMessage) -> None:
        for message in messages:
            self.send_raw(msgspec.msgpack.encode(message))

    def send_raw(self, frame: bytes) -> None:
        self._socket.send_multipart([self.peer, frame])

    async def serve(self) -> None:
        """Get the client to "ready"."""
        await self.received(wire.Hello)
        self.send(wire.Welcome(wire.WIRE_VERSION, "one"), wire.Status("ready"))
        await self.received(wire.Describe)
        self.send(wire.InfoReply(0, scripted_info(EngineConfig())))

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/e"


@pytest.fixture
async def engine(address: str) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(address)
    engine.open()
    yield engine
    engine.close()


@pytest.fixture
def host(address: str) -> Iterator[RawHost]:
    host = RawHost(address)
    yield host
    host.close()


async def test_another_version_is_told_with_both_versions(host: RawHost, engine: RemoteEngine) -> None:
    await host.received(wire.Hello)
    host.send(wire.VersionRefused(7, wire.WIRE_VERSION))
    await until(lambda: engine.state().state == "failed", "the refusal arrived")
    assert "version 7" in engine.state().message
    assert f"version {wire.WIRE_VERSION}" in engine.state().message
    with pytest.raises(EngineDiedError, match="version 7"):
        await collect(engine, request())


async def test_late_duplicates_and_older_attempts_are_dropped(host: RawHost, engine: RemoteEngine) -> None:
    await host.serve()
    await engine.wait_ready()
    task = asyncio.create_task(collect(engine, request(attempt=2, resume_ids=[10, 11])))
    await host.received(wire.Submit)
    host.send(
        wire.Outputs([TokenOutput("r", 1, 2, [99], "stop")]),
        wire.Outputs([TokenOutput("r", 2, 2, [12])]),
        wire.Outputs([TokenOutput("r", 2, 2, [12])]),
        wire.Outputs([TokenOutput("other", 2, 0, [5])]),
        wire.Outputs([TokenOutput("r", 2, 0, [10, 11, 12])]),
        wire.Outputs([TokenOutput("r", 2, 3, [13], "length")]),
        wire.Outputs([TokenOutput("r", 2, 3, [13], "length")]),
    )
    output = await task
    assert (output.offset, output.token_ids, output.finish_reason) == (2, [12, 13], "length")
    await until(lambda: engine.counters["late_outputs"] == 5, "all duplicates were counted")


async def test_a_hole_in_the_stream_ends_it_so_that_it_is_resumed(host: RawHost, engine: RemoteEngine) -> None:
    await host.serve()
    await engine.wait_ready()
    task = asyncio.create_task(collect(engine, request()))
    await host.received(wire.Submit)
    host.send(wire.Outputs([TokenOutput("r", 0, 0, [1])]), wire.Outputs([TokenOutput("r", 0, 2, [3])]))
    with pytest.raises(EngineDiedError):
        await task
    assert (await host.received(wire.Abort)).request_id == "r"


async def begun(host: RawHost, engine: RemoteEngine) -> AsyncIterator[TokenOutput]:
    """Return a stream that has had its first token."""
    await host.serve()
    await engine.wait_ready()
    stream = engine.generate(request())
    first = asyncio.create_task(anext(stream))
    await host.received(wire.Submit)
    host.send(wire.Outputs([TokenOutput("r", 0, 0, [1])]))
    assert (await first).token_ids == [1]
    host.heard.clear()
    return stream


@pytest.mark.parametrize("kind", [wire.Finish, wire.Abort])
async def test_closing_a_stream_that_was_ended_does_not_abort_it_again(
    host: RawHost, engine: RemoteEngine, kind: type[wire.Finish | wire.Abort]
) -> None:
    stream = await begun(host, engine)
    await (engine.finish("r", 1) if kind is wire.Finish else engine.abort("r"))
    await stream.aclose()  # type: ignore[attr-defined]
    later = asyncio.create_task(engine.load())
    call = await host.received(wire.GetLoad)
    assert [type(message) for message in host.heard] == [kind, wire.GetLoad]
    host.send(wire.LoadReply(call.call_id, EngineLoad()))
    await later


async def test_a_later_attempt_ends_the_earlier_one_at_both_ends(host: RawHost, engine: RemoteEngine) -> None:
    stream = await begun(host, engine)
    earlier = asyncio.create_task(anext(stream))
    later = asyncio.create_task(collect(engine, request(attempt=1)))
    await host.received(wire.Submit)
    assert [type(message) for message in host.heard] == [wire.Abort, wire.Submit]
    with pytest.raises(RequestFailedError):
        await earlier
    host.send(
        wire.Outputs([TokenOutput("r", 0, 1, [], "abort")]),
        wire.Outputs([TokenOutput("r", 1, 0, [5], "length")]),
    )
    assert (await later).token_ids == [5]


async def test_noise_from_the_engine_is_counted_and_dropped(host: RawHost, engine: RemoteEngine) -> None:
    await host.serve()
    await engine.wait_ready()
    host.send_raw(b"\xc1noise")
    host.send_raw(msgspec.msgpack.encode([35, "not a batch"]))
    host.send_raw(b"")
    await until(lambda: engine.counters["malformed_frames"] == 3, "the noise was counted")
    task = asyncio.create_task(collect(engine, request()))
    await host.received(wire.Submit)
    host.send(wire.Outputs([TokenOutput("r", 0, 0, [1], "stop")]))
    assert (await task).token_ids == [1]


@pytest.mark.parametrize(
    "fields",
    [
        {"running": -1},
        {"kv_blocks_total": 2**60},
        {"prefill_busy_s_total": float("nan")},
        {"decode_busy_s_total": float("inf")},
        {"decode_busy_s_total": -1.0},
        {"requests_total": {"stop": -1}},
    ],
    ids=str,
)
async def test_a_load_that_cannot_be_is_noise(host: RawHost, engine: RemoteEngine, fields: dict[str, Any]) -> None:
    await host.serve()
    await engine.wait_ready()
    host.send(wire.LoadReport(0, EngineLoad(**fields)), wire.LoadReport(0, EngineLoad(running=3)))
    await until(lambda: engine.latest_load == EngineLoad(running=3), "the sound report is taken")
    assert engine.counters["malformed_frames"] == 1


@pytest.mark.parametrize("fields", [{"block_size": 0}, {"vocab_size": 2**31}, {"max_model_len": -1}], ids=str)
async def test_an_engine_of_impossible_shape_is_not_ready(
    host: RawHost, engine: RemoteEngine, fields: dict[str, int]
) -> None:
    await host.received(wire.Hello)
    host.send(wire.Welcome(wire.WIRE_VERSION, "one"), wire.Status("ready"))
    await host.received(wire.Describe)
    host.send(wire.InfoReply(0, msgspec.structs.replace(scripted_info(EngineConfig()), **fields)))
    await until(lambda: engine.counters["malformed_frames"] == 1, "it is noise")
    assert not engine.is_ready


async def test_an_asset_without_end_is_given_up(
    host: RawHost, engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "MAX_ASSET_BYTES", 1000)
    await host.serve()
    await engine.wait_ready()
    for size_bytes, data in ((2**40, b"x"), (0, b"x" * 1001)):
        asked = asyncio.create_task(engine.fetch_asset("d"))
        call = await host.received(wire.FetchAsset)
        host.send(wire.AssetReply(call.call_id, size_bytes, data))
        with pytest.raises(EngineError, match="larger than"):
            await asked


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:99999", "ipc:///" + "x" * 200, "nonsense"], ids=ascii)
async def test_an_address_that_nobody_can_have_is_told_and_harms_nobody(address: str) -> None:
    engine = RemoteEngine(address)
    engine.open()
    assert engine.state().message.startswith(("It cannot be connected to", "Waiting"))
    engine.give_up("Enough.")
    with pytest.raises(EngineDiedError):
        await collect(engine, request())
    engine.close()


async def test_a_new_incarnation_means_that_every_request_is_gone(
    host: RawHost, engine: RemoteEngine, address: str
) -> None:
    await host.serve()
    await engine.wait_ready()
    task = asyncio.create_task(collect(engine, request()))
    await host.received(wire.Submit)
    host.send(wire.Bye())
    with pytest.raises(EngineDiedError):
        await task
    await host.received(wire.Hello)
    host.send(wire.Welcome(wire.WIRE_VERSION, "two"), wire.Status("loading", 0.5, "weights"))
    await until(lambda: engine.state().incarnation == "two", "the new engine is known")
    assert (engine.state().state, engine.state().progress) == ("loading", 0.5)
    assert engine.state().info is None
