"""CURVE on the wire: who is not listed gets nothing, who is listed gets everything, and the list may change."""

from __future__ import annotations

import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from engine.errors import ConfigError
from engine.wire import messages as wire
from engine.wire.client import REFUSED_MESSAGE, RemoteEngine
from engine.wire.curve import KeyGate, KeyPair, read_clients, secure_client
from engine.wire.host import WireHost
from tests.support.scripted_engine import scripted_process, scripted_tokens
from tests.support.until import until
from tests.support.wire_bench import Bench
from tests.support.wire_requests import collect, request

SERVER, FRIEND, STRANGER = KeyPair.new(), KeyPair.new(), KeyPair.new()
FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    path = tmp_path / "clients"
    befriend(path, FRIEND)
    return path


def befriend(path: Path, *clients: KeyPair) -> None:
    lines = [f"{client.public} gateway-{number}" for number, client in enumerate(clients)]
    path.write_text("\n".join(["# who may connect", *lines, "", ""]), encoding="ascii")


@pytest.fixture
def bench(clients: Path) -> Iterator[Bench]:
    with Bench("tcp://127.0.0.1:0", keys=SERVER, clients_file=clients) as bench:
        bench.serve()
        yield bench


class Knocker:
    """A client that says Hello, and watches what becomes of its connection."""

    def __init__(self, address: str, keys: KeyPair | None, server_key: str = SERVER.public) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        if keys is not None:
            secure_client(self._socket, keys, server_key)
        self._monitor = self._socket.get_monitor_socket(FAILURES)
        self._socket.connect(address)
        self._socket.send(msgspec.msgpack.encode(wire.Hello(wire.WIRE_VERSION, 100)))

    @property
    def was_turned_away(self) -> bool:
        return bool(self._monitor.poll(0))

    @property
    def got_something(self) -> bool:
        return bool(self._socket.poll(0))

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._context.destroy(0)


@pytest.fixture
def knock(bench: Bench) -> Iterator[Callable[..., Knocker]]:
    knockers: list[Knocker] = []

    def make(*keys: Any) -> Knocker:  # noqa: ANN401
        knockers.append(Knocker(bench.host.address, *keys))
        return knockers[-1]

    yield make
    for knocker in knockers:
        knocker.close()


@pytest.mark.parametrize(
    "keys",
    [(STRANGER,), (None,), (FRIEND, STRANGER.public), (KeyPair(FRIEND.public, STRANGER.secret),)],
    ids=["unlisted key", "no key", "another server's key", "a friend's public key alone"],
)
def test_who_is_not_listed_gets_nothing_and_harms_nobody(
    bench: Bench, knock: Callable[..., Knocker], keys: tuple[Any, ...]
) -> None:
    bad = knock(*keys)
    bench.pump_until(lambda: bad.was_turned_away)
    good = knock(FRIEND)
    bench.pump_until(lambda: good.got_something)
    assert not bad.got_something
    assert bench.host.num_peers == 1
    assert bench.host.counters["malformed_frames"] == 0
    assert (bench.host.num_refused > 0) == (keys == (STRANGER,))


def test_noise_instead_of_a_handshake_is_parted_with(bench: Bench, knock: Callable[..., Knocker]) -> None:
    host, port = bench.host.address.removeprefix("tcp://").split(":")
    for noise in (b"GET / HTTP/1.1\r\n\r\n" * 20, b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(60), bytes(4096)):
        with socket.create_connection((host, int(port))) as raw:
            raw.settimeout(20)
            raw.sendall(noise)
            try:
                while raw.recv(4096):  # its greeting, and then the end
                    bench.host.pump()
            except ConnectionResetError:
                pass  # noise was left unread
    good = knock(FRIEND)
    bench.pump_until(lambda: good.got_something)
    assert bench.host.num_peers == 1


def test_the_engines_own_keys_may_connect(bench: Bench, knock: Callable[..., Knocker]) -> None:
    supervisor = knock(SERVER)
    bench.pump_until(lambda: supervisor.got_something)


def test_the_list_is_read_again_and_a_broken_one_changes_nothing(
    bench: Bench, knock: Callable[..., Knocker], clients: Path
) -> None:
    stranger = knock(STRANGER)
    bench.pump_until(lambda: stranger.was_turned_away)
    befriend(clients, FRIEND, STRANGER)
    stranger = knock(STRANGER)
    bench.pump_until(lambda: stranger.got_something)
    clients.write_text("no key at all\n", encoding="ascii")
    friend = knock(FRIEND)
    bench.pump_until(lambda: friend.got_something)
    assert bench.host.num_peers == 2


def test_without_a_gate_that_answers_nobody_gets_in() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = KeyGate(gate_context, SERVER, None)
    server = context.socket(zmq.ROUTER)
    server.set(zmq.LINGER, 0)
    gate.secure(server)  # of another context: here nobody answers
    server.bind("tcp://127.0.0.1:0")
    knocker = Knocker(server.get_string(zmq.LAST_ENDPOINT), SERVER)
    try:
        end = time.monotonic() + 20
        while not knocker.was_turned_away:
            assert time.monotonic() < end
            assert not server.poll(5)
        assert not server.poll(0)
    finally:
        knocker.close()
        context.destroy(0)
        gate_context.term()


async def test_a_remote_engine_works_with_keys_and_says_why_it_does_not(tmp_path: Path, clients: Path) -> None:
    key_file = tmp_path / "worker.key"
    SERVER.write(key_file)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        friend = RemoteEngine(address, keys=FRIEND, server_key=SERVER.public, watch_load=True)
        stranger = RemoteEngine(address, keys=STRANGER, server_key=SERVER.public)
        security = {"key_file": str(key_file), "clients_file": str(clients)}
        with scripted_process(address, listen_fd=listener.fileno(), security=security) as process:
            try:
                friend.open()
                stranger.open()
                await friend.wait_ready()
                assert (await collect(friend, request())).token_ids == scripted_tokens(1, 20)
                await until(lambda: friend.latest_load is not None, "load is reported")
                await until(lambda: stranger.state().message == REFUSED_MESSAGE, "the stranger is told")
                assert stranger.counters["lost_connections"] == 0

                process.kill_and_wait()
                await until(lambda: friend.state().state == "dead", "the death is noticed")
                process.start()
                await friend.wait_ready()

                befriend(clients, FRIEND, STRANGER)
                await stranger.wait_ready()
                assert (await collect(stranger, request(seed=2))).token_ids == scripted_tokens(2, 20)
            finally:
                friend.close()
                stranger.close()


def test_a_key_file_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key"
    FRIEND.write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KeyPair.read(path) == FRIEND
    assert FRIEND.secret not in repr(KeyPair.read(path))
    with pytest.raises(ConfigError, match="cannot be made: File exists"):
        STRANGER.write(path)
    assert KeyPair.read(path) == FRIEND


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no pair"),
        ("public abc\nsecret def\n", "holds no pair"),
        (f"public {'#' * 40}\nsecret {'#' * 40}\n", "holds no pair"),
        (f"public {FRIEND.public}\nsecret {STRANGER.secret}\n", "do not belong together"),
        ("\xff" * 100, "holds no pair"),
    ],
    ids=["empty", "no keys", "no Z85", "of two pairs", "no text"],
)
def test_a_key_file_that_cannot_be_used_is_refused_without_showing_it(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "key"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=message) as caught:
        KeyPair.read(path)
    assert STRANGER.secret not in str(caught.value)


def test_a_list_of_clients_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "clients"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_clients(path)
    for text in ("abc", "#" * 40, FRIEND.public[:-1]):
        path.write_text(text + "\n", encoding="ascii")
        with pytest.raises(ConfigError, match="public key"):
            read_clients(path)


def test_half_of_the_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="both"):
        RemoteEngine("tcp://127.0.0.1:1", keys=FRIEND)
    with pytest.raises(ConfigError, match="no public key"):
        RemoteEngine("tcp://127.0.0.1:1", keys=FRIEND, server_key="short")


def test_an_address_in_use_is_a_wrong_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match="Address already in use"):
            WireHost(address)
