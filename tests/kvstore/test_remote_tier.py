"""The remote tier on a real Valkey: the contract, what is kept how long, and what replicas see of each other."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from kvstore.batch import Batch
from kvstore.encryption import AesGcmCodec
from kvstore.errors import CorruptObjectError, TierUnusableError
from kvstore.keys import tenant_scope
from kvstore.remote import upkeep
from kvstore.remote.names import EPOCHS
from kvstore.remote.tier import RemoteTier
from kvstore.tier import Deadline, Put, Tier, TierEvent
from tests.support.kv_objects import DIGEST, key_of, object_of
from tests.support.lying_server import lying_server
from tests.support.remote_tiers import client_of, name_of, open_remote, remote_tier, running_server, socket_of
from tests.support.tier_contract import SIZE, TierContract, load, loaded, probe, save, soon, statuses
from tests.support.tls_relay import Certificates, tls_relay
from tests.support.until import until
from tests.support.valkey_server import ValkeyServer

DOCUMENTED = Path(__file__).parents[2] / "docs" / "kv-store.md"
DAY_MS = 24 * 3600 * 1000


@pytest.fixture(scope="module")
def running() -> Iterator[ValkeyServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def server(running: ValkeyServer) -> ValkeyServer:
    """A server with nothing in it."""
    client_of(running).flushall()
    return running


@pytest.fixture
def events() -> list[TierEvent]:
    return []


@pytest.fixture(params=["tcp", "unix"])
def tier(request: pytest.FixtureRequest, server: ValkeyServer, events: list[TierEvent]) -> Iterator[RemoteTier]:
    url = f"unix://{socket_of(server)}?db=1" if request.param == "unix" else server.url
    with remote_tier(url, on_event=events.append) as tier:
        yield tier


class TestContract(TierContract):
    pass


class TestEncryptedContract(TierContract):
    @pytest.fixture
    def tier(self, server: ValkeyServer, events: list[TierEvent]) -> Iterator[RemoteTier]:
        with remote_tier(server.url, codec=AesGcmCodec(b"s" * 32), on_event=events.append) as tier:
            yield tier

    def test_what_is_saved_wrong_is_never_served(self, tier: Tier) -> None:
        """What is not the object of its key is not even stored; a payload is believed, and its tag is right then."""
        batch = Batch(2)
        noise = bytearray(b"\x55" * SIZE)
        tier.save(
            [Put(key_of(n), (memoryview(data),)) for n, data in ((10, object_of(20)), (12, noise))],
            soon(),
            batch.report,
        )
        assert statuses(batch) == ["refused"] * 2
        assert loaded(tier, [10, 12]) == ["miss"] * 2

    def test_objects_of_another_size_are_never_served(self, tier: Tier) -> None:
        batch = Batch(1)
        tier.save([Put(key_of(7), (memoryview(object_of(7))[:-4096],))], soon(), batch.report)
        assert statuses(batch) == ["refused"]
        assert loaded(tier, [7]) == ["miss"]


def test_every_use_keeps_an_object_for_another_time_to_live(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "TICK_S", 0.05)
    client = client_of(server)
    with remote_tier(server.url) as tier:
        assert statuses(save(tier, range(5))) == ["ok"] * 5
        names = [name_of(number) for number in range(5)]
        assert all(DAY_MS / 2 < client.pttl(name) <= DAY_MS for name in names)
        for name in names:
            client.pexpire(name, 1_000_000)
        assert loaded(tier, [0]) == ["ok"]
        assert probe(tier, [key_of(1), key_of(9)]) == 1
        assert statuses(save(tier, [2])) == ["ok"]
        tier.touch([key_of(3), key_of(9)])
        asyncio.run(until(lambda: client.pttl(names[3]) > DAY_MS / 2, "the use is told to the server"))
        assert [client.pttl(name) > DAY_MS / 2 for name in names] == [True, True, True, True, False]


def test_objects_that_nobody_uses_are_gone_after_their_time(server: ValkeyServer) -> None:
    with remote_tier(server.url, ttl_s=1) as tier:
        assert statuses(save(tier, [1])) == ["ok"]
        asyncio.run(until(lambda: not client_of(server).exists(name_of(1)), "it is gone"))
        assert loaded(tier, [1]) == ["miss"]


def test_replicas_share_what_they_save(server: ValkeyServer) -> None:
    with remote_tier(server.url) as one, remote_tier(server.url) as other:
        assert statuses(save(one, range(4))) == ["ok"] * 4
        assert loaded(other, range(5)) == ["ok"] * 4 + ["miss"]
        # What is there is not sent again.
        assert statuses(save(other, range(4))) == ["ok"] * 4
        assert other.stats().save_bytes_total == 0
        other.delete([key_of(0)])
        asyncio.run(until(lambda: loaded(one, [0, 1]) == ["miss", "ok"], "the other one's deletion is seen"))


def test_what_one_drops_is_soon_gone_for_all(server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "TICK_S", 0.05)
    scope = tenant_scope(b"k" * 32, "a")
    events: list[TierEvent] = []
    client = client_of(server)
    with remote_tier(server.url) as one, remote_tier(server.url, on_event=events.append) as other:
        assert statuses(save(one, range(20))) == ["ok"] * 20
        assert statuses(save(one, range(3), scope=scope)) == ["ok"] * 3
        one.drop(owner=key_of(0, scope=scope).owner)
        asyncio.run(until(lambda: probe(other, [key_of(0, scope=scope)]) == 0, "the drop of an owner is seen"))
        assert loaded(other, range(20)) == ["ok"] * 20
        asyncio.run(until(lambda: client.dbsize() == 21, "what was dropped is deleted"))
        one.drop()
        assert loaded(one, range(3)) == ["miss"] * 3
        assert statuses(save(one, [7])) == ["ok"]
        asyncio.run(until(lambda: loaded(other, [0, 7]) == ["miss", "ok"], "the drop of everything is seen"))
        assert TierEvent("cleared") in events
        asyncio.run(
            until(lambda: client.keys("kv1:*") in ([EPOCHS, name_of(7, 1)], [name_of(7, 1), EPOCHS]), "all is gone")
        )
    # It is remembered by the server, not by who dropped it.
    with remote_tier(server.url) as later:
        assert loaded(later, [0, 7]) == ["miss", "ok"]


def test_large_objects_are_neither_saved_nor_loaded(server: ValkeyServer) -> None:
    with remote_tier(server.url, max_object_bytes=SIZE - 1) as tier:
        assert statuses(save(tier, [1])) == ["refused"]
        assert statuses(load(tier, [key_of(1)])[0]) == ["refused"]
        assert tier.stats().save_breaker == "closed"
    for wrong in ({"max_object_bytes": 1 << 30}, {"ttl_s": 0}):
        with pytest.raises(ValueError, match="objects"):
            RemoteTier(server.url, **wrong)  # type: ignore[arg-type]


def test_too_much_that_waits_is_refused(server: ValkeyServer) -> None:
    tier = open_remote(server.url, writers=0, max_queued_bytes=SIZE)
    batch = save(tier, range(3))
    assert [outcome.status for outcome in batch.outcomes if outcome] == ["refused", "refused"]
    tier.close(Deadline.after(0))
    assert statuses(batch) == ["cancelled", "refused", "refused"]


def test_objects_of_many_pieces_and_of_several_windows(server: ValkeyServer) -> None:
    """More pieces than one call takes, and more objects than are asked for at once."""
    with remote_tier(server.url, readers=1, writers=1) as tier:
        views = [memoryview(bytes(object_of(number))) for number in range(200)]
        cut = [tuple(view[at : at + 7] for at in range(0, view.nbytes, 7)) for view in views[:2]]
        batch = Batch(200)
        parts = [*cut, *((view,) for view in views[2:])]
        tier.save([Put(key_of(number), one) for number, one in enumerate(parts)], soon(), batch.report)
        assert statuses(batch) == ["ok"] * 200
        assert loaded(tier, range(200)) == ["ok"] * 200
        assert probe(tier, [key_of(number) for number in range(1500)]) == 200


def test_what_the_server_uses_is_told(server: ValkeyServer) -> None:
    client = client_of(server)
    client.config_set("maxmemory", 1 << 30)
    try:
        with remote_tier(server.url) as tier:
            stats = tier.stats()
    finally:
        client.config_set("maxmemory", 0)
    assert stats.capacity_bytes == 1 << 30
    assert 0 < stats.used_bytes < 1 << 30
    assert stats.unindexed


def test_tiers_leave_no_descriptors_and_threads(server: ValkeyServer) -> None:
    def open_and_use() -> tuple[int, int]:
        with remote_tier(server.url) as tier:
            assert statuses(save(tier, range(4))) == ["ok"] * 4
            assert loaded(tier, range(4)) == ["ok"] * 4
        return len(os.listdir("/proc/self/fd")), sum(one.name.startswith("kv-remote") for one in threading.enumerate())

    first = open_and_use()
    assert [open_and_use() for _ in range(3)] == [first] * 3
    assert first[1] == 0


def test_connections_that_fail_leave_no_descriptors(tmp_path: Path) -> None:
    """Nobody answers, nobody is there, or no TLS is spoken."""
    with lying_server() as server, remote_tier(server.url) as plain:
        server.answers[b"GETEX"] = b"nonsense\r\n"
        begun = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            assert set(loaded(plain, range(3))) <= {"failed", "refused"}
        for url in (f"unix://{tmp_path}/nobody", server.url.replace("redis://", "rediss://")):
            for _ in range(5):
                with remote_tier(url) as tier:
                    assert loaded(tier, [1]) == ["refused"]
        # One of its own connections may be there or not, and the server's end of it.
        assert len(os.listdir("/proc/self/fd")) <= begun + 2 * (len(plain._threads) + 1)


# Which servers are taken


def test_settings_that_do_not_fit_a_cache_are_told(server: ValkeyServer, caplog: pytest.LogCaptureFixture) -> None:
    client = client_of(server)
    client.config_set("save", "3600 1")
    client.config_set("appendonly", "yes")
    try:
        with remote_tier(server.url):
            pass
    finally:
        client.config_set("save", "")
        client.config_set("appendonly", "no")
    for word in ("maxmemory:", "noeviction", "snapshots", "appendonly", "io-threads"):
        assert word.rstrip(":") in caplog.text


def test_clusters_and_replicas_are_refused(server: ValkeyServer) -> None:
    with running_server(cluster_enabled="yes") as cluster, pytest.raises(TierUnusableError, match="cluster mode"):
        open_remote(cluster.url)
    with (
        running_server(replicaof=f"127.0.0.1 {server.port}") as replica,
        pytest.raises(TierUnusableError, match="replica"),
    ):
        open_remote(replica.url)


def test_passwords_are_needed_and_never_told(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    secret = "s3cret/word"
    with running_server(requirepass=secret) as server:
        place = f"127.0.0.1:{server.port}"
        for url in (f"redis://{place}", f"redis://:wrong{secret[:4]}@{place}", f"redis://{place}/99"):
            with pytest.raises(TierUnusableError) as refused:
                open_remote(url)
            assert secret[:4] not in str(refused.value)
        (tmp_path / "password").write_text(secret + "\n")
        urls = [f"redis://default:s3cret%2Fword@{place}/1", f"redis://{place}/2?password_file={tmp_path / 'password'}"]
        for url in urls:
            with remote_tier(url) as tier:
                assert statuses(save(tier, [1])) == ["ok"]
                assert secret not in repr(tier.address) + str(tier.address) + repr(vars(tier))
                # Corrupt objects and outages are logged with the server's place.
                tier._condemn(key_of(1), CorruptObjectError("magic", "as a test"))
    assert place in caplog.text
    assert "s3cret" not in caplog.text


def test_users_that_may_do_little_suffice(server: ValkeyServer) -> None:
    """The commands that docs/kv-store.md asks for, and no others."""
    client = client_of(server)
    line = next(line for line in DOCUMENTED.read_text().splitlines() if line.startswith("user headrace"))
    allowed = [word for word in line.split() if word.startswith("+")]
    client.acl_setuser("headrace", enabled=True, passwords=["+pw"], keys=["kv1:*"], commands=allowed)
    try:
        with remote_tier(f"redis://headrace:pw@127.0.0.1:{server.port}/1") as tier:
            assert statuses(save(tier, range(3))) == ["ok"] * 3
            assert loaded(tier, range(3)) == ["ok"] * 3
            assert probe(tier, [key_of(0)]) == 1
            tier.delete([key_of(0)])
            tier.drop(DIGEST)
            assert statuses(save(tier, range(3))) == ["ok"] * 3
    finally:
        client.acl_deluser("headrace")


def test_tls_is_checked_on_both_sides(server: ValkeyServer, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    certificate, key = certificates.make("client")
    files = {"ssl_ca_certs": certificates.authority, "ssl_certfile": certificate, "ssl_keyfile": key}

    def url(port: int, names: Iterable[str]) -> str:
        return f"rediss://127.0.0.1:{port}/0?" + "&".join(f"{name}={files[name]}" for name in names)

    with tls_relay(server.port, certificates) as port:
        with remote_tier(url(port, files)) as tier:
            assert statuses(save(tier, range(100))) == ["ok"] * 100
            assert loaded(tier, range(100)) == ["ok"] * 100
            assert probe(tier, [key_of(number) for number in range(101)]) == 100
        # Neither an authority that is not known nor a client without a certificate: nothing is sent to such a server.
        for some in ([], ["ssl_ca_certs"]):
            with remote_tier(url(port, some)) as tier:
                assert set(loaded(tier, [1])) <= {"refused", "failed"}
    with pytest.raises(TierUnusableError, match="files for TLS"):
        open_remote("rediss://127.0.0.1?ssl_ca_certs=/nowhere")
