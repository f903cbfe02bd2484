"""A worker's addresses, its refusal of open doors, and what it tells a registry through its life."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.wire.curve import KeyPair
from router.registry.base import Announcement, GatewayRecord, Record, WorkerRecord
from server.cli.main import run as run_command
from server.config import WorkerConfig
from server.worker.addresses import is_reachable_from_outside, open_places
from server.worker.process import Worker, check_security
from server.worker.record import state_of
from tests.support.until import until


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as sockets:
        yield sockets


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("ipc:///tmp/x", False),
        ("tcp://127.0.0.1:1", False),
        ("tcp://127.8.8.8:1", False),
        ("tcp://localhost:1", False),
        ("tcp://[::1]:1", False),
        ("tcp://0.0.0.0:1", True),
        ("tcp://*:1", True),
        ("tcp://[::]:1", True),
        ("tcp://10.0.0.1:1", True),
        ("tcp://worker-1.example:1", True),
    ],
)
def test_an_address_tells_whether_others_reach_it(address: str, expected: bool) -> None:
    assert is_reachable_from_outside(address) is expected


@pytest.mark.parametrize("address", ["", "5570", "tcp://", "tcp://127.0.0.1", "tcp://::1:5", "udp://h:1", "ipc://"])
def test_what_is_no_address_is_refused(address: str, sockets: ExitStack) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        open_places(address, None, 1, None, sockets)


def test_ranks_take_ports_of_their_own_and_advertise_what_others_reach(sockets: ExitStack) -> None:
    places = open_places("tcp://0.0.0.0:0", None, 2, "worker-1", sockets)
    addresses = [place for rank in places for place in (rank.wire, rank.events, rank.events_replay)]
    ports = {place.address.rpartition(":")[2] for place in addresses}
    assert len(ports) == 6
    for place in addresses:
        port = place.address.rpartition(":")[2]
        assert place.advertised == f"tcp://worker-1:{port}"
        assert place.local == f"tcp://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", int(port))).close()
    assert open_places("tcp://*:0", None, 1, None, sockets)[0].wire.advertised.startswith(
        f"tcp://{socket.gethostname()}:"
    )
    assert open_places("tcp://127.0.0.1:0", None, 1, "fe80::1", sockets)[0].wire.advertised.startswith(
        "tcp://[fe80::1]"
    )


def test_fixed_ports_follow_each_other_and_a_taken_one_is_named(sockets: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"tcp://127.0.0.1:{port}: Address already in use"):
            open_places(f"tcp://127.0.0.1:{port}", None, 1, None, sockets)
    with pytest.raises(ConfigError, match="do not exist"):
        open_places("tcp://127.0.0.1:65535", None, 2, None, sockets)


def test_ranks_on_ipc_have_names_of_their_own(tmp_path: Path, sockets: ExitStack) -> None:
    places = open_places(f"ipc://{tmp_path}/w", None, 2, None, sockets)
    assert [rank.wire.address for rank in places] == [f"ipc://{tmp_path}/w", f"ipc://{tmp_path}/w.1"]
    assert len({place.address for rank in places for place in (rank.events, rank.events_replay)}) == 4
    assert places[0].fds == ()


def test_an_open_door_is_refused_unless_somebody_asks_for_it(tmp_path: Path) -> None:
    for fields in ({"listen": "tcp://0.0.0.0:0"}, {"events_listen": "tcp://0.0.0.0:0"}):
        with pytest.raises(ConfigError, match="nothing would ask who connects"):
            check_security(WorkerConfig(**fields))
        assert check_security(WorkerConfig(**fields, insecure=True)) is None
    with pytest.raises(ConfigError, match="needs --wire-key-file"):
        check_security(WorkerConfig(wire_clients_file="clients"))
    keys = KeyPair.new()
    keys.write(tmp_path / "key")
    secured = WorkerConfig(listen="tcp://0.0.0.0:0", wire_key_file=str(tmp_path / "key"))
    assert check_security(secured) == keys
    with pytest.raises(ConfigError, match="cannot be read"):
        check_security(WorkerConfig(wire_key_file=str(tmp_path / "key"), wire_clients_file=str(tmp_path / "none")))


def test_the_command_line_refuses_it_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["worker", "smollm2", "--listen", "tcp://0.0.0.0:0"]) == 2
    said = capsys.readouterr().err
    assert "error: tcp://0.0.0.0:0 can be reached from other machines" in said
    assert "--insecure" in said


def test_a_key_pair_is_made_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    assert run_command(["keys", "pair", str(path)]) == 0
    assert capsys.readouterr().out.strip() == KeyPair.read(path).public
    assert run_command(["keys", "pair", str(path)]) == 2


def test_a_worker_is_ready_while_any_rank_is() -> None:
    assert state_of([False, False], [False, False], is_stopping=False) == "starting"
    assert state_of([False, True], [False, False], is_stopping=False) == "ready"
    assert state_of([False, True], [True, False], is_stopping=False) == "ready"
    assert state_of([False, False], [True, True], is_stopping=False) == "draining"
    assert state_of([True, True], [False, False], is_stopping=True) == "draining"


class Notebook:
    """A registry that keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[Record] = []
        self.is_withdrawn = self.is_closed = False

    async def watch(self) -> AsyncIterator[tuple[WorkerRecord, ...]]:
        yield ()

    async def watch_gateways(self) -> AsyncIterator[tuple[GatewayRecord, ...]]:
        yield ()

    async def announce(self, record: Record) -> Announcement:
        self.told.append(record)
        return Page(self)

    async def close(self) -> None:
        self.is_closed = True


class Page:
    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook

    async def update(self, record: Record) -> None:
        self._notebook.told.append(record)

    async def close(self) -> None:
        self._notebook.is_withdrawn = True


async def test_a_registry_is_told_of_every_state_and_of_the_end(tmp_path: Path, sockets: ExitStack) -> None:
    config = WorkerConfig(engine=EngineConfig(model="ok"))
    places = open_places(f"ipc://{tmp_path}/w", None, 2, None, sockets)
    book = Notebook()
    worker = Worker(config, "w", places, "http://127.0.0.1:1", None, book, "tests.support.scripted_engine")
    running = asyncio.create_task(worker.run())

    def states() -> list[str]:
        found = [record.state for record in book.told if isinstance(record, WorkerRecord)]
        return [state for number, state in enumerate(found) if not number or found[number - 1] != state]

    await until(lambda: states() == ["starting", "ready"], "it is ready")
    first, last = book.told[0], book.told[-1]
    assert isinstance(first, WorkerRecord)
    assert isinstance(last, WorkerRecord)
    assert (first.compatibility, first.model, first.ranks[0].wire) == ("", "ok", f"ipc://{tmp_path}/w")
    assert last.compatibility
    assert last.numerics == "cpu/none/float32/default"
    assert first.incarnation == last.incarnation
    worker.life.signal(signal.SIGTERM)
    assert await running == 0
    assert states() == ["starting", "ready", "draining"]
    assert book.is_withdrawn
    assert book.is_closed
