"""The fleet over real engine processes: who is listed serves, who is gone does not, and streams survive the change."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

import server.fleet.fleet
import server.fleet.link
from engine.protocol import GenerateRequest, SamplingParams
from engine.wire.curve import KeyPair
from router.registry.base import RankAddress, WorkerRecord
from server.config import RoutingConfig
from server.fleet.fleet import Fleet
from server.fleet.model_pool import ModelPool
from server.fleet.router_metrics import RouterMetrics
from server.fleet.routes import fleet_routes
from tests.support.api_server import chat_body, serving_models
from tests.support.listed_registry import ListedRegistry
from tests.support.processes import text_core
from tests.support.text_core import ALPHABET
from tests.support.until import until

MODEL = "tiny"


def record(path: Path, name: str, **fields: object) -> WorkerRecord:
    known = {"worker_id": name, "incarnation": "1", "model": MODEL}
    ranks = (RankAddress(dp_rank=0, wire=f"ipc://{path}/{name}"),)
    return WorkerRecord(**{**known, "ranks": ranks, **fields})  # type: ignore[arg-type]


def request(name: str, count: int) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_ids=[5, 6], sampling=SamplingParams(seed=1, max_tokens=count))


async def run(pool: ModelPool, name: str, count: int = 50) -> list[int]:
    return [token async for output in pool.supervisor.generate(request(name, count)) for token in output.token_ids]


def expected(count: int) -> list[int]:
    return [ALPHABET[index % 26] for index in range(count)]


@asynccontextmanager
async def fleet_over(registry: ListedRegistry) -> AsyncIterator[Fleet]:
    fleet = Fleet(registry, RoutingConfig(policy="least_requests"))
    await fleet.start()
    try:
        await until(lambda: MODEL in fleet.pools, "the model has a pool")
        yield fleet
    finally:
        await fleet.close()


async def ready(pool: ModelPool, *names: str) -> None:
    await until(
        lambda: sorted(one.target_id for one in pool.links.values() if one.engine.is_ready) == sorted(names),
        f"{names} are ready",
    )


async def test_requests_are_spread_over_all_that_are_listed(tmp_path: Path) -> None:
    with text_core(f"ipc://{tmp_path}/a", step_s=0.001), text_core(f"ipc://{tmp_path}/b", step_s=0.001):
        async with fleet_over(ListedRegistry(record(tmp_path, "a"), record(tmp_path, "b"))) as fleet:
            pool = fleet.pools[MODEL]
            await ready(pool, "a/0", "b/0")
            tasks = [asyncio.create_task(run(pool, f"r{number}", 1000)) for number in range(8)]
            await until(lambda: pool.pool.in_flight == {"a/0": 4, "b/0": 4}, "they share the load")
            assert [await task for task in tasks] == [expected(1000)] * 8
            assert set(pool.pool.in_flight.values()) == {0}
            (model,) = fleet.served()
            await model.opened.wait()
            assert model.name == MODEL


async def test_a_stream_outlives_its_engine_and_the_next_process_is_used_again(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first = stack.enter_context(text_core(f"ipc://{tmp_path}/a", step_s=0.001))
        stack.enter_context(text_core(f"ipc://{tmp_path}/b", step_s=0.001))
        fleet = await stack.enter_async_context(
            fleet_over(ListedRegistry(record(tmp_path, "a"), record(tmp_path, "b")))
        )
        pool = fleet.pools[MODEL]
        await ready(pool, "a/0", "b/0")
        tasks = [asyncio.create_task(run(pool, f"r{number}", 2000)) for number in range(4)]
        await until(lambda: pool.pool.in_flight == {"a/0": 2, "b/0": 2}, "both work")
        first.kill()
        assert [await task for task in tasks] == [expected(2000)] * 4
        await ready(pool, "b/0")
        stack.enter_context(text_core(f"ipc://{tmp_path}/a", step_s=0.001))
        await ready(pool, "a/0", "b/0")
        assert await run(pool, "again") == expected(50)


async def test_who_is_no_longer_listed_gets_nothing_new_and_ends_what_it_has(tmp_path: Path) -> None:
    with text_core(f"ipc://{tmp_path}/a", step_s=0.001), text_core(f"ipc://{tmp_path}/b", step_s=0.001):
        registry = ListedRegistry(record(tmp_path, "a"))
        async with fleet_over(registry) as fleet:
            pool = fleet.pools[MODEL]
            await ready(pool, "a/0")
            stream = asyncio.create_task(run(pool, "long", 3000))
            await until(lambda: pool.pool.in_flight == {"a/0": 1}, "it runs")
            registry.list(record(tmp_path, "b"))
            await ready(pool, "b/0")
            assert not stream.done()
            assert await run(pool, "new") == expected(50)
            assert pool.pool.in_flight == {"b/0": 0}
            assert await stream == expected(3000)
            assert pool.supervisor.counters["resumed"] == 0, "nothing had to be moved"


async def test_a_rank_keeps_its_connection_when_the_registry_learns_which_process_it_is(tmp_path: Path) -> None:
    with text_core(f"ipc://{tmp_path}/a", step_s=0.001):
        registry = ListedRegistry(record(tmp_path, "a"))
        async with fleet_over(registry) as fleet:
            pool = fleet.pools[MODEL]
            await ready(pool, "a/0")
            stream = asyncio.create_task(run(pool, "long", 3000))
            await until(lambda: pool.pool.in_flight == {"a/0": 1}, "it runs")
            (link,) = fleet.links
            rank = RankAddress(dp_rank=0, wire=f"ipc://{tmp_path}/a", incarnation="known-now")
            registry.list(record(tmp_path, "a", ranks=(rank,), state="ready", compatibility="1" * 64))
            await until(lambda: link.record.state == "ready", "the change is known")
            assert fleet.links == [link]
            assert not stream.done()
            assert await stream == expected(3000)
            assert pool.supervisor.counters["resumed"] == 0
            moved = RankAddress(dp_rank=0, wire=f"ipc://{tmp_path}/b")
            registry.list(record(tmp_path, "a", ranks=(moved,)))
            await until(lambda: fleet.links != [link], "another address is another connection")


async def test_a_stream_on_a_silent_engine_that_is_no_longer_listed_goes_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.fleet.link, "RETIRE_SILENT_LOOKS", 5)
    with text_core(f"ipc://{tmp_path}/a", step_s=0.001) as first, text_core(f"ipc://{tmp_path}/b", step_s=0.001):
        registry = ListedRegistry(record(tmp_path, "a"))
        async with fleet_over(registry) as fleet:
            pool = fleet.pools[MODEL]
            await ready(pool, "a/0")
            stream = asyncio.create_task(run(pool, "long", 3000))
            await until(lambda: pool.pool.in_flight == {"a/0": 1}, "it runs")
            first.send_signal(signal.SIGSTOP)
            registry.list(record(tmp_path, "b"))
            assert await stream == expected(3000)
            assert pool.pool.in_flight == {"b/0": 0}


@pytest.mark.parametrize("state", ["draining", "dead"])
async def test_a_record_says_that_its_worker_takes_nothing_new(tmp_path: Path, state: str) -> None:
    with text_core(f"ipc://{tmp_path}/a", step_s=0.001), text_core(f"ipc://{tmp_path}/b", step_s=0.001):
        registry = ListedRegistry(record(tmp_path, "a"), record(tmp_path, "b"))
        async with fleet_over(registry) as fleet:
            pool = fleet.pools[MODEL]
            await ready(pool, "a/0", "b/0")
            stream = asyncio.create_task(run(pool, "first", 3000))
            await until(lambda: sum(pool.pool.in_flight.values()) == 1, "it runs")
            (busy,) = (name for name, count in pool.pool.in_flight.items() if count)
            free = "b/0" if busy == "a/0" else "a/0"
            names = [record(tmp_path, name, state=state if f"{name}/0" == busy else "starting") for name in "ab"]
            registry.list(*names)
            await until(
                lambda: {one.target_id: one.state for one in pool.pool.dispatcher.status()}.get(busy) in (state, None),
                "the change is known",
            )
            tasks = [asyncio.create_task(run(pool, f"r{number}", 500)) for number in range(4)]
            await until(lambda: pool.pool.in_flight[free] == 4, "all go to the other one")
            assert [await task for task in tasks] == [expected(500)] * 4
            assert await stream == expected(3000)


async def test_a_worker_that_differs_from_the_others_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with text_core(f"ipc://{tmp_path}/a"), text_core(f"ipc://{tmp_path}/b"):
        right = record(tmp_path, "a", state="ready", compatibility="1" * 64)
        registry = ListedRegistry(right)
        async with fleet_over(registry) as fleet:
            pool = fleet.pools[MODEL]
            await ready(pool, "a/0")
            registry.list(right, record(tmp_path, "b", state="ready", compatibility="2" * 64))
            await until(lambda: len(fleet.links) == 2, "both are connected to")
            assert list(pool.links) == ["a/0"]
            assert "1" * 64 in caplog.text
            assert "2" * 64 in caplog.text
            registry.list(right, record(tmp_path, "b", state="ready", compatibility="1" * 64))
            await ready(pool, "a/0", "b/0")


async def test_operators_see_the_workers_and_why_a_request_went_where_it_went(tmp_path: Path) -> None:
    with text_core(f"ipc://{tmp_path}/a") as process, text_core(f"ipc://{tmp_path}/b"):
        fleet = Fleet(ListedRegistry(record(tmp_path, "a"), record(tmp_path, "b")), RoutingConfig(policy="session"))
        async with serving_models(fleet) as server:
            server.app.include_router(fleet_routes(fleet))
            await fleet.opened.wait()
            await ready(fleet.pools[MODEL], "a/0", "b/0")
            answers = [
                (await server.chat(max_tokens=3, n=2, **fields)).json()["id"]
                for fields in ({"user": "u"}, {"prompt_cache_key": "u", "user": "other"})
            ]
            headers = {"x-session-id": "u"}
            body = chat_body(max_tokens=3, prompt_cache_key="other")
            named = await server.client.post("/v1/chat/completions", json=body, headers=headers)
            answers.append(named.json()["id"])
            told = [(await server.client.get(f"/router/explain?request_id={one}")).json() for one in answers]
            targets = {decision["target_id"] for one in told for decision in one["decisions"]}
            workers = {one["target_id"]: one for one in (await server.client.get("/router/workers")).json()}
            metrics = RouterMetrics(server.service.metrics.registry, fleet.pools)
            for _ in range(2):
                metrics.update()
            scraped = (await server.client.get("/metrics")).text
            missing = await server.client.get("/router/explain")
            unknown = await server.client.get("/router/explain?request_id=chatcmpl-none")
            outside = await server.client.get("/router/workers", headers={"x-forwarded-for": "10.0.0.1"})
    assert [len(one["decisions"]) for one in told] == [2, 2, 1]
    assert len(targets) == 1, "one conversation stays where it is, however it is named"
    assert 'headrace_router_requests_total{model="tiny",outcome="ok",policy="session"} 5.0' in scraped
    assert 'headrace_router_queued{class="default",model="tiny"} 0.0' in scraped
    decision = told[0]["decisions"][0]
    assert decision["policy"] == "session"
    assert {option["score"]["target_id"] for option in decision["options"]} == {"a/0", "b/0"}
    assert workers["a/0"]["pid"] == process.pid
    assert workers["a/0"]["digest"] == workers["b/0"]["digest"]
    assert workers["b/0"]["status"]["in_flight"] == 0
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "request_id")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")
    assert outside.status_code == 403


async def test_records_that_cannot_be_followed_harm_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.fleet.fleet, "MAX_MODELS", 2)
    odd = [
        record(tmp_path, "secret", public_key="rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"),
        record(tmp_path, "bad-key", public_key="#" * 40),
        record(tmp_path, "long", ranks=(RankAddress(dp_rank=0, wire="ipc:///" + "x" * 300),)),
        record(tmp_path, "other", model="other", ranks=(RankAddress(dp_rank=0, wire="tcp://127.0.0.1:99999"),)),
        record(tmp_path, "third", model="third"),
    ]
    with text_core(f"ipc://{tmp_path}/a"):
        registry = ListedRegistry(*odd)
        async with fleet_over(registry) as fleet:
            assert set(fleet.pools) == {MODEL, "other"}
            registry.list(*odd, record(tmp_path, "a"))
            pool = fleet.pools[MODEL]
            await ready(pool, "a/0")
            assert await run(pool, "r") == expected(50)
            assert "secret cannot be connected to: It asks for keys" in caplog.text
            assert "third is not served" in caplog.text
            registry.list(record(tmp_path, "third", model="third"), record(tmp_path, "a"))
            await until(lambda: set(fleet.pools) == {MODEL, "third"}, "it has the place of one that nobody has")
            assert await run(pool, "again") == expected(50)


@pytest.mark.parametrize("insecure", [False, True])
async def test_a_gateway_with_a_key_sends_nothing_in_the_clear_to_other_machines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, insecure: bool
) -> None:
    def at(name: str, wire: str, events: str | None = None) -> WorkerRecord:
        rank = RankAddress(dp_rank=0, wire=wire, events=events, events_replay=events)
        return record(tmp_path, name, ranks=(rank,))

    local = f"ipc://{tmp_path}/a"
    records = [
        at("local", local),
        at("loopback", "tcp://127.0.0.1:9"),
        at("remote", "tcp://192.0.2.7:5570"),
        at("remote-events", f"ipc://{tmp_path}/b", "tcp://192.0.2.7:5571"),
        at("named", "tcp://worker.example:5570"),
    ]
    refused = set() if insecure else {"remote", "remote-events", "named"}
    fleet = Fleet(ListedRegistry(*records), RoutingConfig(), keys=KeyPair.new(), insecure=insecure)
    await fleet.start()
    try:
        await until(lambda: len(fleet.links) + len(refused) == len(records), "all records are seen")
        assert {link.record.worker_id for link in fleet.links} == {one.worker_id for one in records} - refused
        for one in records:
            told = f"{one.worker_id} cannot be connected to: It has no key"
            assert (told in caplog.text) == (one.worker_id in refused)
        assert ("or this gateway --insecure" in caplog.text) == bool(refused)
    finally:
        await fleet.close()


async def test_only_so_many_ranks_are_connected_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.fleet.fleet, "MAX_LINKS", 2)
    with text_core(f"ipc://{tmp_path}/a"):
        async with fleet_over(ListedRegistry(*(record(tmp_path, name) for name in "abcd"))) as fleet:
            await ready(fleet.pools[MODEL], "a/0")
            assert len(fleet.links) == 2
            assert "more than 2 ranks" in caplog.text


async def test_models_have_pools_of_their_own(tmp_path: Path) -> None:
    with text_core(f"ipc://{tmp_path}/a"), text_core(f"ipc://{tmp_path}/b"):
        registry = ListedRegistry(record(tmp_path, "a"), record(tmp_path, "b", model="other"))
        async with fleet_over(registry) as fleet:
            await until(lambda: set(fleet.pools) == {MODEL, "other"}, "both have one")
            await ready(fleet.pools[MODEL], "a/0")
            await ready(fleet.pools["other"], "b/0")
            assert await run(fleet.pools["other"], "r") == expected(50)
            assert fleet.pools[MODEL].pool.dispatcher.outcomes == {}
