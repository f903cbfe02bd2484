"""Load reports: pushed on change and when idle, bounded by credit, and telling which requests they count."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from engine.protocol import EngineLoad
from engine.wire import messages as wire
from engine.wire.client import RemoteEngine
from engine.wire.load_reports import LoadReports
from engine.wire.load_watch import LOAD_CREDIT
from engine.wire.peers import Peer
from tests.support.scripted_engine import ScriptedProcess, scripted_process
from tests.support.until import until
from tests.support.wire_bench import Bench
from tests.support.wire_requests import collect, request

ENDLESS = 1_000_000


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(f"ipc://{tmp_path}/e") as bench:
        bench.serve()
        yield bench


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ScriptedProcess]:
    with scripted_process(f"ipc://{tmp_path}/e") as process:
        yield process


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(f"ipc://{tmp_path}/e", watch_load=True)
    engine.open()
    yield engine
    engine.close()


def watchers(*credits: int) -> tuple[LoadReports, list[Peer]]:
    reports = LoadReports()
    peers = [Peer(str(number).encode(), number, 1, load_credit=credit) for number, credit in enumerate(credits)]
    for peer in peers:
        reports.watch(peer)
    return reports, peers


def test_a_change_is_reported_soon_and_silence_after_a_while() -> None:
    reports, peers = watchers(9)
    assert reports.due_in_s(50.0) == 0.0, "who is new is told at once"
    assert reports.take_due(50.0) == peers
    assert reports.due_in_s(50.0) == pytest.approx(wire.LOAD_REPORT_MAX_S)
    reports.note_change()
    assert reports.due_in_s(50.0) == pytest.approx(wire.LOAD_REPORT_MIN_S)
    assert reports.due_in_s(50.02) == 0.0
    reports.forget(peers[0])
    assert reports.due_in_s(90.0) == float("inf")


def test_who_has_no_credit_is_not_told_and_gets_the_newest_when_it_grants_some() -> None:
    reports, (slow, quick) = watchers(0, 9)
    assert reports.take_due(50.0) == [quick]
    slow.load_credit = 1
    reports.watch(slow)
    assert reports.due_in_s(50.0) == pytest.approx(wire.LOAD_REPORT_MIN_S), "it has missed a report"
    assert reports.take_due(51.0) == [slow, quick]
    slow.load_credit = 2
    reports.watch(slow)
    assert reports.due_in_s(51.0) == pytest.approx(wire.LOAD_REPORT_MAX_S), "it has missed none"


def test_a_report_tells_how_many_of_the_peers_submits_it_counts(bench: Bench) -> None:
    one, other = bench.welcomed(), bench.welcomed()
    one.send(wire.WatchLoad(1000))
    other.send(wire.WatchLoad(1000))
    assert one.received(wire.LoadReport)[0].submits == 0
    for number in range(3):
        one.send(wire.Submit(request(f"r{number}", count=ENDLESS)))
    one.send(wire.Submit(request("r0")))  # refused, and counted as handled all the same
    while (report := one.received(wire.LoadReport)[-1]).submits < 4:
        assert report.load.running == report.submits
    assert report.load.running == 3
    while (report := other.received(wire.LoadReport)[-1]).load.running < 3:
        pass
    assert report.submits == 0


def test_a_peer_that_does_not_read_is_sent_no_more_reports_than_it_granted(bench: Bench) -> None:
    slow, quick = bench.welcomed(), bench.welcomed()
    slow.send(wire.WatchLoad(2))
    quick.send(wire.WatchLoad(100_000))
    quick.send(wire.Submit(request(count=ENDLESS)))
    bench.pump_until(lambda: bench.host.num_running == 1)
    seen = 0
    while seen < 20:
        bench.run_steps(1)
        seen += len(quick.waiting(wire.LoadReport))
    assert len(slow.waiting(wire.LoadReport)) == 2
    slow.send(wire.WatchLoad(1))
    assert slow.received(wire.LoadReport)[0].load.steps_total >= bench.core.steps - 1, "the newest, not the next"


def test_an_idle_engine_that_waits_for_messages_reports_all_the_same(bench: Bench) -> None:
    peer = bench.welcomed()
    peer.send(wire.WatchLoad(1000))
    peer.received(wire.LoadReport)
    end = time.monotonic() + 20
    while not peer.waiting(wire.LoadReport):
        assert time.monotonic() < end
        bench.host.pump(10.0)  # returns for the report, not at the end of its patience


async def test_a_remote_engine_knows_the_load_without_asking(process: ScriptedProcess, engine: RemoteEngine) -> None:
    seen: list[EngineLoad] = []
    engine.on_load = seen.append
    assert engine.latest_load is None
    assert engine.load_age_s == float("inf")
    await engine.wait_ready()
    stream = engine.generate(request(count=ENDLESS))
    await anext(stream)
    await until(lambda: engine.submits_reported == engine.submits_sent == 1, "the request is in a report")
    assert engine.latest_load is not None
    assert engine.latest_load.running == 1
    assert 0.0 <= engine.load_age_s < float("inf")
    await until(lambda: len(seen) > 3 * LOAD_CREDIT, "credit is granted again and again")
    assert seen[-1].steps_total > seen[0].steps_total
    await stream.aclose()
    await until(lambda: seen[-1].running == 0, "the end is reported")


async def test_what_is_known_of_the_load_ends_with_the_engine(process: ScriptedProcess, engine: RemoteEngine) -> None:
    await engine.wait_ready()
    await collect(engine, request())
    await until(lambda: engine.latest_load is not None, "a report came")
    process.signal(signal.SIGKILL)
    await until(lambda: engine.state().state == "dead", "the death is noticed")
    assert engine.latest_load is None
    await process.restart()
    await until(lambda: engine.latest_load is not None, "the next one reports")
    assert engine.latest_load == EngineLoad()
    assert engine.submits_reported == 0


async def test_who_does_not_watch_is_told_nothing(process: ScriptedProcess, engine: RemoteEngine) -> None:
    other = RemoteEngine(engine.address)
    other.open()
    try:
        await asyncio.gather(engine.wait_ready(), other.wait_ready())
        await until(lambda: engine.latest_load is not None, "the watcher is told")
        await collect(other, request())
        assert other.latest_load is None
    finally:
        other.close()
