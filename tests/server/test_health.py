"""Liveness, readiness and what model routes answer before, during and after."""

from __future__ import annotations

import asyncio
import json

import pytest

import server.served_model
from engine.errors import EngineDiedError
from engine.protocol import EngineInfo
from server.config import ServeConfig
from server.health import ServiceState
from server.served_model import ServedModel
from server.version import VERSION
from tests.support.api_server import ListedModels, chat_body, event_data, serving, serving_models
from tests.support.fake_engine import FakeEngine, FakeReadiness, Gate


async def test_while_loading_the_port_answers_with_the_progress() -> None:
    state = FakeReadiness(ServiceState("loading", progress=0.42))
    async with serving(FakeEngine(), state=state, wait=False) as server:
        health = await server.client.get("/health")
        refused = [
            await server.client.get("/v1/models"),
            await server.client.get("/v1/models/tiny"),
            await server.chat(),
            await server.chat(stream=True),
            await server.complete(),
        ]
        ready = await server.client.get("/ready")
        metrics = await server.client.get("/metrics")
        state.become(ServiceState("ready"))
        await server.model.opened.wait()
        assert (await server.client.get("/health")).json() == {"status": "ready"}
        assert (await server.chat()).status_code == 200
    assert (health.status_code, health.json()) == (503, {"status": "loading", "progress": 0.42})
    assert health.headers["retry-after"] == "1"
    assert ready.status_code == 503
    assert metrics.status_code == 200
    for response in refused:
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "model_is_loading"
        assert "42%" in response.json()["error"]["message"]


async def test_a_restarting_engine_is_not_healthy_but_requests_may_wait_for_it() -> None:
    state = FakeReadiness()
    async with serving(FakeEngine(), state=state) as server:
        state.become(ServiceState("restarting", progress=0.5))
        health = await server.client.get("/health")
        ready = await server.client.get("/ready")
        answer = await server.chat()
    assert (health.status_code, health.json()["status"]) == (503, "restarting")
    assert ready.status_code == 503
    assert answer.status_code == 200


async def test_an_engine_that_dies_while_it_describes_itself_is_asked_again() -> None:
    class Shaky(FakeEngine):
        tries = 0

        async def describe(self) -> EngineInfo:
            self.tries += 1
            if self.tries < 2:
                raise EngineDiedError("gone")
            return await super().describe()

    engine = Shaky()
    async with serving(engine) as server:
        assert (await server.client.get("/health")).status_code == 200
    assert engine.tries == 2


async def test_text_assets_that_cannot_be_used_are_told_until_an_engine_has_better_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server.served_model, "RETRY_BROKEN_S", 0.01)
    engine = FakeEngine()
    right = engine.assets
    engine.assets = dict.fromkeys(engine.assets, b"not a tokenizer")
    async with serving(engine, wait=False) as api:
        for _ in range(1000):
            health = await api.client.get("/health")
            if health.json()["status"] != "loading":
                break
        assert health.status_code == 503
        assert health.json()["status"] == "failed"
        assert "tokenizer" in health.json()["error"]
        engine.assets = right
        await api.model.opened.wait()
        assert (await api.client.get("/health")).status_code == 200
        assert (await api.complete()).status_code == 200


async def test_a_drain_refuses_new_requests_and_lets_running_ones_end() -> None:
    engine = FakeEngine()
    engine.say("Hello")
    gate = engine.gate = Gate(after=2)
    async with serving(engine) as server:
        running = asyncio.create_task(server.chat(stream=True))
        await gate.reached.wait()
        drain = asyncio.create_task(server.service.traffic.drain(60))
        await asyncio.sleep(0)
        ready, health = await server.client.get("/ready"), await server.client.get("/health")
        refused = await server.chat()
        assert not drain.done()
        gate.opened.set()
        await drain
        events = event_data((await running).text)
    assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
    assert health.status_code == 200
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "server_is_draining"
    assert events[-1] == "[DONE]"


async def test_the_end_of_a_drain_is_told_to_streams_and_to_those_who_wait() -> None:
    engine = FakeEngine()
    gate = engine.gate = Gate(after=2)
    async with serving(engine, config=ServeConfig()) as server:
        stream = asyncio.create_task(server.post("/v1/chat/completions", chat_body(stream=True)))
        whole = asyncio.create_task(server.post("/v1/chat/completions", chat_body()))
        await gate.reached.wait()
        await engine.until(lambda: len(engine.running) == 2)
        await server.service.traffic.drain(0.01)
        events = event_data((await stream).text)
        answer = await whole
    assert json.loads(events[-1])["error"]["code"] == "server_is_draining"
    assert "[DONE]" not in events
    assert answer.status_code == 503
    assert engine.running == set()
    assert len(engine.aborted) == 2


async def test_version_and_load_are_told() -> None:
    async with serving(FakeEngine()) as server:
        version = await server.client.get("/version")
        load = await server.client.get("/load")
    assert version.json() == {"version": VERSION}
    assert load.json()["kv_blocks_total"] == 9
    assert load.json()["steps_total"] == 17


async def test_several_models_answer_under_their_names() -> None:
    """Each request goes to its own model's engine; one that is still loading keeps none of the others from serving."""
    loading = FakeReadiness(ServiceState("loading", progress=0.5))
    engines = {"tiny": FakeEngine(), "other": FakeEngine(model="other"), "late": FakeEngine(model="late")}
    readiness = {"tiny": FakeReadiness(), "other": FakeReadiness(), "late": loading}
    models = [ServedModel(engine, readiness[name], name=name) for name, engine in engines.items()]
    async with serving_models(ListedModels(models)) as server:
        for model in models[:2]:
            await model.opened.wait()
        listed = (await server.client.get("/v1/models")).json()["data"]
        answers = {name: await server.chat(model=name) for name in ("tiny", "other", "late", "othr")}
        unnamed = await server.post("/tokenize", {"prompt": "Hi"})
        named = await server.post("/tokenize", {"prompt": "Hi", "model": "other"})
        load = (await server.client.get("/load")).json()
    assert [card["id"] for card in listed] == ["tiny", "other"]
    assert [answers[name].status_code for name in answers] == [200, 200, 503, 404]
    assert answers["late"].json()["error"]["code"] == "model_is_loading"
    assert "other" in answers["othr"].json()["error"]["message"]
    assert (len(engines["tiny"].seen), len(engines["other"].seen)) == (1, 1)
    assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
    assert named.status_code == 200
    assert load["running"] == 0
