"""Leases in a real Valkey: seen at once, gone with their process, and through any outage of the server."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from router.registry.records import MAX_RECORD_BYTES, encode_record
from router.registry.valkey import ValkeyRegistry
from tests.support.registries import Watcher, gateway, ids, worker
from tests.support.valkey_server import ValkeyServer, valkey_server

ANNOUNCER = """
import asyncio, sys
from router.registry.open import open_registry
from tests.support.registries import worker
async def main():
    await open_registry(sys.argv[1]).announce(worker(sys.argv[2]))
    await asyncio.Event().wait()
asyncio.run(main())
"""


def announcer(url: str, worker_id: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", ANNOUNCER, url, worker_id], cwd=Path(__file__).parents[2])


@pytest.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[ValkeyServer]:
    with valkey_server(tmp_path) as server:
        await server.wait_ready()
        yield server


async def test_records_come_change_and_go(valkey: ValkeyServer) -> None:
    ours, theirs = ValkeyRegistry(valkey.url), ValkeyRegistry(valkey.url)
    elsewhere = ValkeyRegistry(valkey.url, namespace="other")
    workers, gateways, others = Watcher(ours.watch()), Watcher(ours.watch_gateways()), Watcher(elsewhere.watch())
    await workers.until(lambda records: records == ())
    starting = await theirs.announce(worker("w1", state="starting"))
    await workers.until(lambda records: ids(records) == ["w1"])
    await theirs.announce(gateway("g"))
    assert await gateways.until(bool) == (gateway("g"),)
    await starting.update(worker("w1"))
    await workers.until(lambda records: [record.state for record in records] == ["ready"])
    await theirs.announce(worker("w0"))
    await workers.until(lambda records: ids(records) == ["w0", "w1"])
    await starting.close()
    await workers.until(lambda records: ids(records) == ["w0"])
    await theirs.close()
    await workers.until(lambda records: records == ())
    await gateways.until(lambda records: records == ())
    assert others.latest == ()
    for registry in (ours, elsewhere):
        await registry.close()
    for watcher in (workers, gateways, others):
        await watcher.close()


async def test_the_record_of_a_killed_process_ends_with_its_lease(valkey: ValkeyServer) -> None:
    registry = ValkeyRegistry(valkey.url)
    watcher = Watcher(registry.watch())
    process = announcer(valkey.url, "w0")
    try:
        await watcher.until(lambda records: ids(records) == ["w0"])
    finally:
        process.kill()
        process.wait()
    await watcher.until(lambda records: records == ())
    await registry.close()
    await watcher.close()


async def test_a_server_that_comes_back_empty_gets_the_records_again(valkey: ValkeyServer) -> None:
    ours, theirs = ValkeyRegistry(valkey.url), ValkeyRegistry(valkey.url)
    watcher = Watcher(ours.watch())
    announcement = await theirs.announce(worker("w0"))
    await watcher.until(lambda records: ids(records) == ["w0"])
    seen = len(watcher.lists)
    valkey.stop()
    # An update during the outage arrives after it.
    await announcement.update(worker("w0", state="draining"))
    valkey.start()
    await watcher.until(lambda records: [record.state for record in records] == ["draining"])
    async with Redis.from_url(valkey.url) as client:
        await client.flushall()
        await announcement.update(worker("w0", numerics="after the flush"))
        await watcher.until(lambda records: [record.numerics for record in records] == ["after the flush"])
    assert all(ids(records) == ["w0"] for records in watcher.lists[seen:]), "the list was lost meanwhile"
    await theirs.close()
    await watcher.until(lambda records: records == ())
    await ours.close()
    await watcher.close()


async def test_a_server_that_does_not_answer_costs_nothing_but_news(valkey: ValkeyServer) -> None:
    ours, theirs = ValkeyRegistry(valkey.url), ValkeyRegistry(valkey.url)
    watcher = Watcher(ours.watch())
    announcement = await theirs.announce(worker("w0"))
    await watcher.until(lambda records: ids(records) == ["w0"])
    valkey.signal(signal.SIGSTOP)
    await asyncio.wait_for(announcement.update(worker("w0", numerics="later")), 30)
    await asyncio.wait_for(theirs.announce(worker("w1")), 30)
    # Ends by itself although nobody takes note.
    await asyncio.wait_for(announcement.close(), 30)
    assert ids(watcher.latest) == ["w0"]
    valkey.signal(signal.SIGCONT)
    await watcher.until(lambda records: ids(records) == ["w1"])
    await ours.close()
    await theirs.close()
    await watcher.close()


async def test_hostile_content_is_left_out(valkey: ValkeyServer, caplog: pytest.LogCaptureFixture) -> None:
    registry = ValkeyRegistry(valkey.url)
    prefix = registry.prefix
    hostile = {
        "binary\xff\n": b"\xff" * 100,
        "large": b"x" * (MAX_RECORD_BYTES * 3),
        "deep": b"[" * 200_000,
        "other": encode_record(worker("good")),
        "address": encode_record(worker("address", http_url="file:///etc/passwd")),
        "": encode_record(worker("good")),
    }
    async with Redis.from_url(valkey.url) as client:
        for name, data in hostile.items():
            await client.set(f"{prefix}worker:{name}".encode("latin-1"), data)
            await client.sadd(f"{prefix}workers", name.encode("latin-1"))
        watcher = Watcher(registry.watch())
        await registry.announce(worker("good"))
        await watcher.until(lambda records: ids(records) == ["good"])
        # Even of another type altogether: that is an outage, and over when the key is right again.
        await client.delete(f"{prefix}gateways")
        await client.set(f"{prefix}gateways", "text")
        gateways = Watcher(registry.watch_gateways())
        await client.delete(f"{prefix}gateways")
        await gateways.until(lambda records: records == ())
    assert "file:" not in caplog.text
    assert caplog.text.count("left out") >= 5
    await registry.close()
    await watcher.close()
    await gateways.close()


async def test_no_server_at_all_is_survived(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path)
    registry = ValkeyRegistry(server.url)
    watcher = Watcher(registry.watch())
    await registry.announce(worker("w0"))
    server.start()
    try:
        await watcher.until(lambda records: ids(records) == ["w0"])
    finally:
        await registry.close()
        await watcher.close()
        server.stop()
