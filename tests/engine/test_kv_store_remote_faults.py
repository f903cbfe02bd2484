"""A real engine over a real server that dies, stops, crawls, is full, forgets, lies or refuses: every request is
answered as without a store, the server is left alone, and used again when it is well."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis

from engine.llm import LLM
from kvstore.remote import upkeep
from tests.support.remote_tiers import client_of, running_server
from tests.support.slow_relay import SlowRelay
from tests.support.store_llm import engine
from tests.support.store_trial import Trial
from tests.support.tiny_models import write_tiny_llama
from tests.support.valkey_server import ValkeyServer

PASSWORD = "lost"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[LLM]:
    with engine(model) as llm:
        yield llm


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with running_server() as server:
        yield server


@contextmanager
def trial(model: Path, plain: LLM, url: str) -> Iterator[Trial]:
    with engine(model, "ram=16MiB", url) as llm:
        one = Trial(plain, llm)
        one.works()
        yield one


def kill(server: ValkeyServer) -> None:
    server.stop()


def stop(server: ValkeyServer) -> None:
    server.signal(signal.SIGSTOP)


def go_on(server: ValkeyServer) -> None:
    server.signal(signal.SIGCONT)


def fill(server: ValkeyServer) -> None:
    client_of(server).config_set("maxmemory", 1)


def make_room(server: ValkeyServer) -> None:
    client_of(server).config_set("maxmemory", 0)


def lose_password(server: ValkeyServer) -> None:
    client = client_of(server)
    client.config_set("requirepass", PASSWORD)
    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def find_password(server: ValkeyServer) -> None:
    with Redis(port=server.port, password=PASSWORD) as client:
        client.config_set("requirepass", "")


def become_replica(server: ValkeyServer) -> None:
    """Of a server that is not there: what it holds can be read, nothing can be written."""
    client_of(server).execute_command("REPLICAOF", "127.0.0.1", "1")


def become_primary(server: ValkeyServer) -> None:
    client_of(server).execute_command("REPLICAOF", "NO", "ONE")


Act = Callable[[ValkeyServer], None]
FAULTS: dict[str, tuple[Act, Act]] = {
    "killed": (kill, ValkeyServer.start),
    "stopped": (stop, go_on),
    "full": (fill, make_room),
    "password lost": (lose_password, find_password),
    "replica": (become_replica, become_primary),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_for_a_while(
    model: Path, plain: LLM, server: ValkeyServer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "TICK_S", 0.1)
    monkeypatch.setattr(upkeep, "RETRY_S", 0.1)
    begin, end = FAULTS[fault]
    with trial(model, plain, server.url) as one:
        begin(server)
        try:
            one.is_left_alone("save")
        finally:
            end(server)
        one.works()


@pytest.mark.parametrize("fault", ["crawls", "is cut"])
def test_answers_that_do_not_come_whole(model: Path, plain: LLM, server: ValkeyServer, fault: str) -> None:
    relay = SlowRelay(server.port)
    try:
        with trial(model, plain, f"redis://127.0.0.1:{relay.port}/0") as one:
            relay.bytes_per_s, relay.cut_after = (1000, None) if fault == "crawls" else (None, 2000)
            one.is_left_alone("load")
            relay.bytes_per_s = relay.cut_after = None
            one.works()
    finally:
        relay.close()


def flush(server: ValkeyServer) -> None:
    client_of(server).flushall()


def spoil(server: ValkeyServer) -> None:
    """Put something else under every name: other types, other objects, nothing, random bytes, torn ones."""
    client, rng = client_of(server), random.Random(3)
    names = [name for name in client.scan_iter("kv1:{*") if client.type(name) == b"string"]
    objects = [client.get(name) or b"" for name in names]
    for index, name in enumerate(names):
        whole = objects[index]
        client.delete(name)
        match index % 6:
            case 0:
                client.rpush(name, whole)
            case 1:
                client.set(name, whole[: rng.randrange(len(whole))])
            case 2:
                client.set(name, rng.randbytes(len(whole)))
            case 3:
                client.set(name, objects[index - 1])
            case 4:
                client.set(name, b"")
            case 5:
                torn = bytearray(whole)
                torn[rng.randrange(len(torn))] ^= 1 << rng.randrange(8)
                client.set(name, bytes(torn))


@pytest.mark.parametrize("harm", [flush, spoil], ids=["flushed", "spoilt"])
def test_what_is_lost_or_wrong_is_computed_and_stored_again(
    model: Path, plain: LLM, server: ValkeyServer, harm: Act
) -> None:
    with trial(model, plain, server.url) as one:
        harm(server)
        one.ask()
        assert one.breakers == ("closed", "closed"), "a server that answers is not left alone"
        one.works()
