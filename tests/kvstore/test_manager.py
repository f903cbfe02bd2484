"""The store behind one client: what was computed once is found in memory, on disk and after a restart."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvstore.keys import PUBLIC_SCOPE, tenant_scope
from kvstore.manager.config import DirectorySpec, StoreConfig, parse_store
from kvstore.manager.contract import Piece
from kvstore.manager.store import KVStore
from kvstore.namespace import Namespace
from kvstore.tier import Deadline
from tests.support.kv_objects import BLOCK_SIZE, NAMESPACE
from tests.support.numpy_memory import content
from tests.support.remote_tiers import running_server
from tests.support.store_engine import StoreEngine

RAM = StoreConfig(ram_bytes=16 << 20, always_load=True)


def with_disk(path: Path) -> StoreConfig:
    return msgspec.structs.replace(RAM, disk=DirectorySpec(str(path), 64 << 20, 1))


@contextmanager
def opened(config: StoreConfig, namespace: Namespace = NAMESPACE) -> Iterator[tuple[KVStore, StoreEngine]]:
    store = KVStore(config)
    engine = StoreEngine(store, namespace)
    try:
        yield store, engine
        assert store.ram.overdue(0.0) == [], "a lease was left behind"
        store.ram.check_integrity()
    finally:
        engine.close()
        store.close(Deadline.after(30.0))


def prompt(number: int, blocks: int = 6) -> list[int]:
    return random.Random(number).choices(range(1000), k=blocks * BLOCK_SIZE)


def test_a_prompt_comes_back_from_memory() -> None:
    with opened(RAM) as (_, engine):
        tokens = prompt(1)
        assert engine.load(tokens) == ([], 0)
        engine.compute(tokens)
        assert engine.load(tokens) == (["ram"] * 6, 6)
        assert engine.load(tokens[: 4 * BLOCK_SIZE + 3]) == (["ram"] * 4, 4)
        assert engine.load([*tokens[: 2 * BLOCK_SIZE], *prompt(2)]) == (["ram"] * 2, 2)
        assert engine.load(tokens, start=5) == (["ram"], 1)


def test_a_prompt_comes_back_from_disk_after_a_restart(tmp_path: Path) -> None:
    with opened(with_disk(tmp_path)) as (store, engine):
        engine.compute(prompt(1))
        assert store.flush(Deadline.after(60.0))
    with opened(with_disk(tmp_path)) as (_, engine):
        assert engine.load(prompt(1)) == (["disk"] * 6, 6)
        assert engine.load(prompt(1)) == (["ram"] * 6, 6), "it stays in memory"


def test_another_machine_finds_a_prompt_on_the_server() -> None:
    with running_server() as server:
        config = msgspec.structs.replace(RAM, server=server.url)
        with opened(config) as (store, engine):
            engine.compute(prompt(1))
            assert store.flush(Deadline.after(60.0))
        with opened(config) as (_, engine):
            assert engine.load_patiently(prompt(1)) == (["remote"] * 6, 6)
            assert engine.load(prompt(2)) == ([], 0)
            server.stop()
            engine.compute(prompt(3))
            assert engine.load(prompt(3)) == (["ram"] * 6, 6)
            assert engine.load(prompt(4)) == ([], 0)


def test_what_leaves_memory_can_be_encrypted(tmp_path: Path) -> None:
    secret, other = tmp_path / "secret", tmp_path / "other"
    for path, text in ((secret, "ab" * 32), (other, "cd" * 32)):
        path.touch(0o600)
        path.write_text(text)
    config = msgspec.structs.replace(with_disk(tmp_path / "kv"), secret_file=str(secret))
    with opened(config) as (store, engine):
        engine.compute(prompt(1))
        assert store.flush(Deadline.after(60.0))
        shape = engine.memory.planes[0, 0, "k"][0].shape
        plain = content(engine.keys_of(prompt(1))[0], 0, 0, "k", shape).tobytes()
    stored = [path.read_bytes() for path in (tmp_path / "kv").rglob("*.kvb")]
    assert stored
    assert not any(plain in one for one in stored), "a block lies on the disk as it is"
    with opened(config) as (_, engine):
        assert engine.load(prompt(1)) == (["disk"] * 6, 6)
    with opened(msgspec.structs.replace(config, secret_file=str(other))) as (_, engine):
        assert engine.load(prompt(1))[1] == 0


def test_what_is_only_in_part_in_memory_is_found_in_both_tiers(tmp_path: Path) -> None:
    with opened(with_disk(tmp_path)) as (store, engine):
        engine.compute(prompt(1))
        assert store.flush(Deadline.after(60.0))
        keys = engine.keys_of(prompt(1))
        store.ram.delete(engine.client.keys_of(PUBLIC_SCOPE, keys[2:4]))
        assert engine.load(prompt(1)) == (["ram", "ram", "disk", "disk", "ram", "ram"], 6)


def test_tenants_salts_tokens_and_models_miss(tmp_path: Path) -> None:
    first, second = tenant_scope(b"s" * 32, "a"), tenant_scope(b"s" * 32, "b")
    salted = tenant_scope(b"s" * 32, "a", "salt")
    tokens = prompt(1)
    with opened(with_disk(tmp_path)) as (store, engine):
        engine.compute(tokens, first)
        assert store.flush(Deadline.after(60.0))
        for scope in (second, salted, PUBLIC_SCOPE):
            assert engine.load(tokens, scope) == ([], 0)
        assert engine.load([tokens[0] ^ 1, *tokens[1:]], first) == ([], 0)
        assert engine.load(tokens, first) == (["ram"] * 6, 6)
    others = {
        "weights": {"weights_digest": "00" * 32},
        "epoch": {"weights_epoch": "1"},
        "dtype": {"kv_dtype": "int8"},
        "rope": {"rope": '{"theta":1}'},
        "adapter": {"adapter": "x"},
        "numerics": {"numerics": "default/cpu"},
    }
    for name, change in others.items():
        with opened(with_disk(tmp_path), msgspec.structs.replace(NAMESPACE, **change)) as (_, engine):
            assert engine.load(tokens, first) == ([], 0), name
    with opened(with_disk(tmp_path)) as (_, engine):
        assert engine.load(tokens, first) == (["disk"] * 6, 6)


def test_a_request_may_leave_nothing_behind() -> None:
    with opened(RAM) as (_, engine):
        engine.compute(prompt(1), save=False)
        assert engine.load(prompt(1)) == ([], 0)


def test_another_epoch_of_the_weights_finds_nothing_of_before() -> None:
    with opened(RAM) as (store, engine):
        engine.compute(prompt(1))
        engine.client.use_namespace(type(engine.client.parts)(msgspec.structs.replace(NAMESPACE, weights_epoch="1")))
        assert engine.load(prompt(1)) == ([], 0)
        engine.compute(prompt(1))
        assert engine.load(prompt(1)) == (["ram"] * 6, 6)
        store.drop()
        assert engine.load(prompt(1)) == ([], 0)


def test_flush_waits_for_blocks_that_are_still_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(RAM) as (store, engine):
        may_read, read = threading.Event(), engine.memory.read

        def late(pieces: Sequence[Piece]) -> None:
            if threading.current_thread().name == "kv-save":  # windows are read in the caller's
                may_read.wait(60.0)
            read(pieces)

        monkeypatch.setattr(engine.memory, "read", late)
        keys = engine.keys_of(prompt(1))
        ids = engine.take(len(keys))
        engine.client.save(engine.stored("x", prompt(1), keys, ids, PUBLIC_SCOPE))
        assert not store.flush(Deadline.after(0.05))
        may_read.set()
        assert store.flush(Deadline.after(60.0))
        assert all(store.ram.held(key) for key in engine.client.keys_of(PUBLIC_SCOPE, keys))
        engine.leave("x", ids, len(keys))


def test_a_wrong_byte_is_a_shorter_load() -> None:
    with opened(RAM) as (store, engine):
        engine.compute(prompt(1))
        (key, *_) = engine.client.keys_of(PUBLIC_SCOPE, engine.keys_of(prompt(1))[3:4])
        entry = store.ram._books.get(key)
        assert entry is not None
        view = store.ram.arena.view(entry.place, entry.length)
        view[-1] ^= 1
        assert engine.load(prompt(1)) == (["ram"] * 6, 3)
        assert engine.load(prompt(1)) == (["ram"] * 3, 3), "what is corrupt is gone"
        assert store.stats().tiers[0].corrupt == {"payload": 1}


def test_a_device_that_fails_costs_the_load_and_nothing_else() -> None:
    with opened(RAM) as (_, engine):
        engine.compute(prompt(1))
        engine.memory.fail = {"write", "read"}
        assert engine.load(prompt(1)) == (["ram"] * 6, 0)
        engine.compute(prompt(2))
        engine.memory.fail = set()
        assert engine.load(prompt(2)) == ([], 0), "what could not be read was not stored"
        assert engine.load(prompt(1)) == (["ram"] * 6, 6)


def test_loads_that_do_not_pay_are_not_begun() -> None:
    with opened(msgspec.structs.replace(RAM, always_load=False)) as (_, engine):
        engine.compute(prompt(1))
        assert engine.load(prompt(1)) == (["ram"] * 6, 6), "nothing is known yet"
        engine.client.observe_prefill(10**9, 1.0)
        assert engine.load(prompt(1)) == ([], 0)
        for _ in range(200):
            engine.client.observe_prefill(10, 1.0)
        assert engine.load(prompt(1)) == (["ram"] * 6, 6)


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (["disk="], "names no directory"),
        (["ram=4"], "16MiB"),
        (["ram=1GiB", "ram=2GiB"], "already"),
        (["disk=/x,1GiB,max=3"], "'max' is not an option"),
        (["disk=/x,many"], "'many' is not a size"),
        (["floppy=/x"], "floppy=/x"),
        (["shared=/x", "redis://h"], "already"),
        (["redis://h", "redis://user:secret@h"], "//...@h"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_what_an_operator_says_wrong_is_named(specs: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as raised:
        parse_store(specs)
    assert "secret" not in str(raised.value)


def test_what_an_operator_says() -> None:
    assert parse_store([]) is None
    parsed = parse_store(["ram=4GiB", "disk=/data/kv,50GiB,min-free=1.5G", "redis://host:6379/0"])
    assert parsed is not None
    assert parsed.ram_bytes == 4 << 30
    assert parsed.disk == DirectorySpec("/data/kv", 50 << 30, 3 << 29)
    assert parsed.server == "redis://host:6379/0"
