"""The remote tier and servers that die, stop, crawl, are full, forget, or say what is not so."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections.abc import Callable, Iterator

import pytest

from kvstore.batch import Batch
from kvstore.remote import forgotten, lanes, upkeep
from kvstore.remote.forgotten import Forgotten
from kvstore.remote.names import EPOCHS
from kvstore.remote.tier import RemoteTier
from kvstore.tier import Deadline, Put, Status, TierEvent
from tests.support.kv_objects import DIGEST, key_of, object_of
from tests.support.lying_server import lying_server
from tests.support.remote_tiers import client_of, name_of, remote_tier, running_server
from tests.support.slow_relay import SlowRelay
from tests.support.tier_contract import SIZE, load, loaded, probe, save, soon, statuses
from tests.support.until import until
from tests.support.valkey_server import ValkeyServer

NOT_DONE: set[Status] = {"failed", "refused", "late"}


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with running_server() as server:
        yield server


def wait(condition: Callable[[], bool], what: str) -> None:
    asyncio.run(until(condition, what))


def breaker_opens(tier: RemoteTier, limit_s: float) -> None:
    """Load with little time until the tier does not even try any more."""

    def tried() -> bool:
        assert set(statuses(load(tier, [key_of(0)], Deadline.after(limit_s))[0])) <= NOT_DONE
        return tier.stats().load_breaker == "open"

    wait(tried, "the breaker is open")


def comes_back(tier: RemoteTier, numbers: range) -> None:
    """The breakers let one piece through after their pauses."""
    wait(lambda: statuses(save(tier, [numbers[0]])) == ["ok"], "saving works again")
    assert statuses(save(tier, numbers)) == ["ok"] * len(numbers)
    wait(lambda: loaded(tier, [numbers[0]]) == ["ok"], "loading works again")
    assert loaded(tier, numbers) == ["ok"] * len(numbers)


def test_a_killed_server(server: ValkeyServer) -> None:
    with remote_tier(server.url) as tier:
        assert statuses(save(tier, range(8))) == ["ok"] * 8
        server.stop()
        for _ in range(3):
            assert set(loaded(tier, range(8))) <= NOT_DONE
            assert set(statuses(save(tier, range(8)))) <= NOT_DONE
            assert probe(tier, [key_of(0)]) == 0
        assert (tier.stats().load_breaker, tier.stats().save_breaker) != ("closed", "closed")
        server.start()
        comes_back(tier, range(8))


def test_a_server_that_was_started_again_is_no_failure(server: ValkeyServer) -> None:
    """Connections of before are stale: that costs another one, and no piece."""
    with remote_tier(server.url, readers=1, writers=1) as tier:
        assert statuses(save(tier, range(8))) == ["ok"] * 8
        assert loaded(tier, range(8)) == ["ok"] * 8
        assert probe(tier, [key_of(0)]) == 1
        server.stop()
        server.start()
        asyncio.run(server.wait_ready())
        assert loaded(tier, range(8)) == ["miss"] * 8
        assert statuses(save(tier, range(8))) == ["ok"] * 8
        assert probe(tier, [key_of(number) for number in range(9)]) == 8
        assert loaded(tier, range(8)) == ["ok"] * 8


def test_a_stopped_server_is_left_alone_and_writes_no_target_later(server: ValkeyServer) -> None:
    with remote_tier(server.url, probe_s=0.1) as tier:
        assert statuses(save(tier, range(4))) == ["ok"] * 4
        assert loaded(tier, range(4)) == ["ok"] * 4
        server.signal(signal.SIGSTOP)
        batch, targets = load(tier, [key_of(number) for number in range(4)], Deadline.after(0.3))
        assert set(statuses(batch)) <= NOT_DONE
        before = [bytes(target) for target in targets]
        breaker_opens(tier, 0.2)
        assert probe(tier, [key_of(0)]) == 0
        server.signal(signal.SIGCONT)
        comes_back(tier, range(4))
        assert [bytes(target) for target in targets] == before


def test_a_server_that_is_not_there_yet(server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "RETRY_S", 0.05)
    server.stop()
    with remote_tier(server.url) as tier:
        assert loaded(tier, [1]) == ["refused"]
        assert statuses(save(tier, [1])) == ["refused"]
        assert probe(tier, [key_of(1)]) == 0
        assert tier.stats().load_breaker == "closed"
        tier.delete([key_of(1)])
        tier.drop(DIGEST)
        server.start()
        comes_back(tier, range(4))


def test_a_crawling_server(server: ValkeyServer) -> None:
    """A kilobyte a second: what is wanted is late, not written to later, and then the server is left alone."""
    relay = SlowRelay(server.port)
    try:
        with remote_tier(f"redis://127.0.0.1:{relay.port}/0") as tier:
            assert statuses(save(tier, range(4))) == ["ok"] * 4
            assert loaded(tier, [0]) == ["ok"]
            relay.bytes_per_s = 1000
            batch, targets = load(tier, [key_of(number) for number in range(4)], Deadline.after(0.5))
            assert statuses(batch) == ["late"] * 4
            before = [bytes(target) for target in targets]
            breaker_opens(tier, 0.2)
            relay.bytes_per_s = None
            comes_back(tier, range(4))
            assert [bytes(target) for target in targets] == before
    finally:
        relay.close()


def test_a_full_server(server: ValkeyServer) -> None:
    """What does not fit is not stored, and soon not even sent; what is there is still found."""
    client = client_of(server)
    with remote_tier(server.url) as tier:
        assert statuses(save(tier, range(8))) == ["ok"] * 8
        client.config_set("maxmemory", 1)
        assert set(statuses(save(tier, range(10, 60)))) <= {"failed", "refused"}
        wait(lambda: statuses(save(tier, [60])) == ["refused"], "saves are not even tried")
        assert loaded(tier, [*range(8), 10]) == ["ok"] * 8 + ["miss"]
        assert probe(tier, [key_of(number) for number in range(11)]) == 8
        # Not even a drop can be counted now: what is dropped is looked for and deleted.
        tier.drop(DIGEST)
        assert loaded(tier, range(8)) == ["miss"] * 8
        wait(lambda: client.dbsize() == 0, "it is deleted")
        client.config_set("maxmemory", 0)
        comes_back(tier, range(8))


def test_a_server_that_was_flushed(server: ValkeyServer) -> None:
    client = client_of(server)
    with remote_tier(server.url) as tier:
        assert statuses(save(tier, range(4))) == ["ok"] * 4
        assert probe(tier, [key_of(number) for number in range(4)]) == 4
        client.flushall()
        client.script_flush()
        assert loaded(tier, range(4)) == ["miss"] * 4
        assert probe(tier, [key_of(0)]) == 0
        assert statuses(save(tier, range(4))) == ["ok"] * 4
        assert probe(tier, [key_of(number) for number in range(4)]) == 4


def test_a_server_that_lost_its_epochs(server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else is lost as well then, so that counting begins anew, for all that use the server."""
    monkeypatch.setattr(upkeep, "TICK_S", 0.05)
    client = client_of(server)
    with remote_tier(server.url) as tier:
        tier.drop(DIGEST)
        assert statuses(save(tier, [1])) == ["ok"]
        assert client.exists(name_of(1, 1))
        client.flushall()
        wait(lambda: statuses(save(tier, [1])) == ["ok"] and client.exists(name_of(1)) == 1, "it is noticed")
        assert loaded(tier, [1]) == ["ok"]


def test_foreign_values_under_our_names(server: ValkeyServer) -> None:
    client = client_of(server)
    with remote_tier(server.url, readers=1) as tier:
        assert statuses(save(tier, range(10))) == ["ok"] * 10
        client.set(name_of(0), b"")
        client.set(name_of(1), b"\r\n$-1\r\n")
        client.set(name_of(2), bytes(SIZE))
        client.set(name_of(3), bytes(9 << 20))  # more than is worth reading
        for name, put in ((name_of(4), client.rpush), (name_of(5), client.sadd)):
            client.delete(name)
            put(name, b"x")
        client.set(name_of(6), bytes(object_of(7)))
        client.set(name_of(8), bytes(object_of(8)) + b"x")
        assert loaded(tier, range(10)) == ["corrupt"] * 7 + ["ok", "corrupt", "ok"]
        assert loaded(tier, range(10)) == ["miss"] * 7 + ["ok", "miss", "ok"]
        assert tier.stats().corrupt == {"short": 4, "magic": 3, "identity": 1}
        assert tier.stats().load_breaker == "closed"
        wait(lambda: client.dbsize() == 2, "they are deleted")


def test_epochs_that_are_no_epochs(server: ValkeyServer) -> None:
    client = client_of(server)
    client.hset(EPOCHS, mapping={b"*/*": b"many", b"x" * 90: b"7", b"version": b"\xff"})
    with remote_tier(server.url) as tier:
        assert statuses(save(tier, [1])) == ["ok"]
        assert loaded(tier, [1]) == ["ok"]
        assert client.exists(name_of(1))


# Replies that are none


def endless(chunk: bytes, first: bytes = b"") -> Iterator[bytes]:
    return itertools.chain([first], itertools.repeat(chunk))


LIES: dict[str, Callable[[], bytes | Iterator[bytes]]] = {
    "a_line_without_end": lambda: endless(b"9" * 4096, b"$"),
    "lines_without_end": lambda: endless(b"hello\r\n"),
    "more_than_there_is": lambda: b"$99999999999999\r\n",
    "more_than_a_number": lambda: b"$" + b"9" * 40 + b"\r\n",
    "a_negative_size": lambda: b"$-7\r\n",
    "a_number": lambda: b":1\r\n",
    "a_large_array": lambda: b"*99999999\r\n",
    "arrays_in_arrays": lambda: endless(b"*1\r\n"),
    "nothing": lambda: b"\r\n",
    "another_protocol": lambda: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "zeros": lambda: endless(bytes(4096)),
    "a_string_that_is_cut": lambda: b"$%d\r\n" % SIZE + bytes(SIZE // 2),
    "a_string_that_does_not_end": lambda: endless(b"x" * 4096, b"$%d\r\n" % SIZE),
    "an_error_without_end": lambda: endless(b"x" * 4096, b"-"),
    "an_error": lambda: b"-LOADING the data set\r\n",
}


@pytest.mark.parametrize("lie", LIES)
def test_replies_that_are_none(lie: str) -> None:
    """To whatever is asked: no exception, no memory for what is only claimed, nothing that is believed."""
    with lying_server() as server, remote_tier(server.url, stall_s=0.2) as tier:
        server.cut = lie == "a_string_that_is_cut"
        for command in (b"GETEX", b"PEXPIRE", b"SET", b"EVALSHA", b"EVAL"):
            server.answers[command] = LIES[lie]()
        assert set(loaded(tier, range(3))) <= {"failed", "refused", "corrupt", "miss"}
        assert set(statuses(save(tier, range(3)))) <= {"failed", "refused", "ok"}
        assert probe(tier, [key_of(0), key_of(1)]) <= 1


@pytest.mark.parametrize("lie", LIES)
def test_errands_that_are_answered_wrongly(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What upkeep asks for may be lied about as well: it goes on trying, and so do loads."""
    monkeypatch.setattr(upkeep, "RETRY_S", 0.01)
    with lying_server() as server, remote_tier(server.url, stall_s=0.2) as tier:
        server.answers[b"GETEX"] = b"$-1\r\n"
        for command in (b"UNLINK", b"HINCRBY", b"HSET", b"SCAN"):
            server.answers[command] = LIES[lie]()
        tier.delete([key_of(1)])
        tier.drop(DIGEST, key_of(1).owner)
        assert set(loaded(tier, [1])) <= {"miss", *NOT_DONE}
        assert statuses(save(tier, [1], Deadline.after(0.2)))[0] in NOT_DONE


def test_deletions_that_cannot_be_told_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgotten, "MAX_DELETIONS", 100)
    events: list[TierEvent] = []
    gone = Forgotten(events.append)
    gone.learn({})
    gone.delete([key_of(number) for number in range(103)])
    key = key_of(101)
    assert gone.name(key) is None
    assert len(gone.next_deletions(1000)) == 100
    assert gone.next_drop() == (key.namespace, key.owner)
    assert len(events) == 103


@pytest.mark.parametrize(("patience_s", "counts"), [(1000.0, False), (0.0, True)])
def test_too_little_time_says_nothing_of_the_server(
    monkeypatch: pytest.MonkeyPatch, patience_s: float, counts: bool
) -> None:
    """A load that ends at its deadline counts as a failure only after so long that the server had its chance."""
    monkeypatch.setattr(lanes, "PATIENCE_S", patience_s)
    with lying_server() as server, remote_tier(server.url, readers=1) as tier:
        server.answers[b"GETEX"] = b""
        for _ in range(4):
            assert set(statuses(load(tier, [key_of(1)], Deadline.after(0.02))[0])) <= {"late", "refused"}
        if counts:
            breaker_opens(tier, 0.02)
        else:
            assert tier.stats().load_breaker == "closed"


# Bits that are not as they were


def spoil(data: bytearray, rng: random.Random) -> bytes:
    """Flip one to three bits, cut, lengthen, or exchange two pages."""
    match rng.randrange(10):
        case 0:
            return bytes(data[: rng.randrange(len(data))])
        case 1:
            return bytes(data) + rng.randbytes(rng.randrange(1, 64))
        case 2:
            page = data[-512:]
            return bytes(data[:-1024] + page + data[-1024:-512])
        case _:
            for place in rng.sample(range(len(data) * 8), rng.randrange(1, 4)):
                data[place // 8] ^= 1 << place % 8
            return bytes(data)


def spoil_and_load(server: ValkeyServer, rounds: int, seed: int) -> None:
    """Each round stores 200 objects, spoils them at the server and loads them: all are found out."""
    rng, client = random.Random(seed), client_of(server)
    originals = [bytes(object_of(number)) for number in range(200)]
    names = [name_of(number) for number in range(200)]
    with remote_tier(server.url) as tier:
        for done in range(1, rounds + 1):
            batch = Batch(200)
            tier.save(
                [Put(key_of(number), (memoryview(data),)) for number, data in enumerate(originals)],
                soon(),
                batch.report,
            )
            assert statuses(batch) == ["ok"] * 200
            with client.pipeline(transaction=False) as pipeline:
                for name, data in zip(names, originals, strict=True):
                    pipeline.set(name, spoil(bytearray(data), rng))
                pipeline.execute()
            assert loaded(tier, range(200)) == ["corrupt"] * 200
            assert sum(tier.stats().corrupt.values()) == done * 200
        assert tier.stats().loads == {"corrupt": rounds * 200}


def test_spoilt_objects_are_all_found_out(server: ValkeyServer) -> None:
    spoil_and_load(server, rounds=50, seed=1)


@pytest.mark.soak
def test_a_hundred_thousand_spoilt_objects_are_all_found_out(server: ValkeyServer) -> None:
    spoil_and_load(server, rounds=500, seed=2)
