"""The router's queue as clients meet it: order by priority, leaving, refusals by reason, and what metrics tell.

Everything is real but the engine, which answers when the test lets it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest
import zmq
from openai import AsyncOpenAI, RateLimitError

from engine.protocol import EngineInfo, EngineLoad
from server.config import RoutingConfig, ServeConfig
from server.fleet.model_pool import ModelPool
from server.fleet.router_metrics import RouterMetrics
from server.served_model import ServedModel
from tests.support.api_server import ApiServer, ListedModels, chat_body, completion_body, serving_models
from tests.support.fake_engine import FakeEngine, FakeReadiness, Gate
from tests.support.static_pool import StaticTarget
from tests.support.until import until

LONG_S = 3600.0


class HeldEngine(FakeEngine):
    """Answers nothing before its gate is opened."""

    is_ready = True

    def __init__(self) -> None:
        super().__init__()
        self.gate: Gate = Gate(after=0)

    async def wait_ready(self) -> EngineInfo:
        return self.info

    async def load(self) -> EngineLoad:
        return EngineLoad(running=len(self.running), waiting=2)


@dataclass
class Queue:
    """A server whose engine has one prompt to compute, and no room for another."""

    server: ApiServer
    engine: HeldEngine
    pool: ModelPool
    metrics: RouterMetrics
    running: asyncio.Task[httpx.Response]

    @property
    def queued(self) -> int:
        return self.pool.pool.admission.queued

    async def wait(self, priority: int | None = None, header: str | None = None) -> asyncio.Task[httpx.Response]:
        """Send a request and return when it is queued."""
        before = self.queued
        fields = {} if priority is None else {"priority": priority}
        headers = {} if header is None else {"x-vllm-priority": header}
        body = completion_body(prompt=f"{priority} {header}", max_tokens=2, **fields)
        post = self.server.client.post("/v1/completions", json=body, headers=headers)
        task = asyncio.create_task(post)
        await until(lambda: self.queued == before + 1, "it is queued")
        return task

    def served(self) -> list[int]:
        """The priorities of the requests that reached the engine, the first one left out."""
        return [request.priority for request in self.engine.seen[1:]]

    async def scrape(self) -> dict[str, float]:
        self.metrics.update()
        lines = (await self.server.client.get("/metrics")).text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, value in pairs}


@asynccontextmanager
async def queue(*, max_queued: int = 10, timeout_s: float = LONG_S, **config: object) -> AsyncIterator[Queue]:
    engine = HeldEngine()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    routing = RoutingConfig(prefill_budget_s=0.001, max_queued=max_queued, queue_timeout_s=timeout_s)
    pool = ModelPool("tiny", routing, context=context, with_events=False)
    pool.pool.add(StaticTarget("t", engine))
    # It is known to compute 100 tokens a second.
    for steps in (0, 1):
        known = EngineLoad(steps_total=steps, prefill_tokens_total=1000 * steps, prefill_busy_s_total=10.0 * steps)
        pool.pool.report_load("t", known)
    model = ServedModel(pool.supervisor, FakeReadiness())
    try:
        async with serving_models(ListedModels([model]), config=ServeConfig(**config)) as server:  # type: ignore[arg-type]
            await model.opened.wait()
            running = asyncio.create_task(server.complete(max_tokens=2))
            await engine.gate.reached.wait()
            metrics = RouterMetrics(server.service.metrics.registry, {"tiny": pool})
            yield Queue(server, engine, pool, metrics, running)
            engine.gate.opened.set()
            await running
        assert (pool.pool.admission.queued, pool.pool.admission.unsettled_tokens) == (0, 0)
        assert set(pool.pool.in_flight.values()) == {0}
    finally:
        await pool.close()
        context.term()


async def test_the_smaller_priority_goes_first_whether_a_field_or_a_header_says_it() -> None:
    async with queue() as it:
        tasks = [await it.wait(5), await it.wait(), await it.wait(-5), await it.wait(header="-7")]
        tasks += [await it.wait(1, header="-9"), await it.wait(header="+3")]
        assert it.served() == []
        it.engine.gate.opened.set()
        assert [(await task).status_code for task in tasks] == [200] * 6
        assert it.served() == [-7, -5, 0, 1, 3, 5], "a field of the body wins over the header"


@pytest.mark.parametrize("header", ["high", "", "1.5", "99999999999", "2147483648"])
async def test_a_header_that_is_no_priority_is_refused(header: str) -> None:
    async with queue() as it:
        body = completion_body()
        refused = await it.server.client.post("/v1/completions", json=body, headers={"x-vllm-priority": header})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "x-vllm-priority"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_the_queue_is_noticed_and_its_request_never_runs(stream: bool) -> None:
    async with queue() as it:
        before = await it.wait()
        leaving = asyncio.create_task(it.server.chat(stream=stream))
        await until(lambda: it.queued == 2, "it is queued")
        leaving.cancel()
        await until(lambda: it.queued == 1, "it has left the queue")
        it.engine.gate.opened.set()
        assert (await before).status_code == 200
        assert len(it.engine.seen) == 2
        scraped = await it.scrape()
        assert scraped["headrace_client_disconnects_total"] == 1
        assert not any(name.startswith("headrace_router_shed_total") for name in scraped), "who leaves is not shed"


async def test_who_waits_too_long_is_told_so_and_counted_apart_from_a_full_queue() -> None:
    async with queue(max_queued=1, timeout_s=0.2) as it:
        client = AsyncOpenAI(base_url=f"{it.server.url}/v1", api_key="none", max_retries=0)
        async with client:
            waits = asyncio.create_task(client.chat.completions.create(**chat_body()))  # type: ignore[call-overload]
            with pytest.raises(RateLimitError) as caught:
                await waits
        assert "waited 0.2 s in the queue" in str(caught.value)
        assert caught.value.code == "server_is_overloaded"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        assert (await it.scrape())['headrace_router_shed_total{model="tiny",reason="queue_timeout"}'] == 1


async def test_a_full_queue_refuses_and_a_higher_class_takes_a_place() -> None:
    async with queue(max_queued=1) as it:
        batch = await it.wait(3)
        refused = await it.server.complete(priority=3)
        assert (refused.status_code, refused.json()["error"]["message"]) == (429, "The queue is full.")
        assert int(refused.headers["retry-after"]) >= 1
        better = asyncio.create_task(it.server.complete(priority=-1))
        displaced = await batch
        assert displaced.status_code == 429
        assert "a request that goes first took this one's place" in displaced.json()["error"]["message"]
        scraped = await it.scrape()
        for reason in ("queue_full", "displaced"):
            assert scraped[f'headrace_router_shed_total{{model="tiny",reason="{reason}"}}'] == 1
        it.engine.gate.opened.set()
        assert (await better).status_code == 200


async def test_a_deadline_in_the_queue_is_the_requests_own() -> None:
    async with queue() as it:
        it.server.service.config = ServeConfig(request_timeout_s=0.2)

        async def is_counted() -> bool:
            """On a slow machine the time may be over before a request has come as far as the queue."""
            late = await it.server.complete()
            assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
            return 'headrace_router_shed_total{model="tiny",reason="deadline"}' in await it.scrape()

        await until(is_counted, "one was queued when its time was over")


async def test_metrics_tell_who_waits_and_for_how_long() -> None:
    async with queue() as it:
        tasks = [await it.wait(-2), await it.wait(), await it.wait(4), await it.wait(5)]
        scraped = await it.scrape()
        for name, count in (("interactive", 1), ("default", 1), ("batch", 2)):
            assert scraped[f'headrace_router_queued{{class="{name}",model="tiny"}}'] == count
        assert scraped["headrace_requests_waiting"] == 2, "the engine's own"
        assert scraped["vllm:num_requests_waiting"] == 2 + 4
        assert scraped['headrace_router_queue_wait_seconds_count{model="tiny"}'] == 1, "the one that runs"
        it.engine.gate.opened.set()
        await asyncio.gather(*tasks)
        scraped = await it.scrape()
        assert scraped['headrace_router_queue_wait_seconds_count{model="tiny"}'] == 5
        assert scraped['headrace_router_queue_wait_seconds_sum{model="tiny"}'] > 0
        assert scraped["vllm:num_requests_waiting"] == 2
