"""What /metrics says after known traffic."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from engine.errors import EngineDiedError
from engine.protocol import EngineLoad
from tests.support.api_server import ApiServer, serving
from tests.support.fake_engine import FakeEngine


async def samples(server: ApiServer) -> dict[tuple[str, ...], float]:
    text = (await server.client.get("/metrics")).text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_requests_tokens_and_latencies_are_counted() -> None:
    engine = FakeEngine()
    engine.say("four")
    async with serving(engine) as server:
        for stream in (False, True):
            await server.complete(prompt="w" * 100, stream=stream)
        await server.chat(model="unknown")
        await server.client.get("/never/heard/of")
        seen = await samples(server)
    assert seen["headrace_http_requests_total", "/v1/completions", "200"] == 2
    assert seen["headrace_http_requests_total", "/v1/chat/completions", "404"] == 1
    assert seen["headrace_http_requests_total", "other", "404"] == 1
    assert seen["headrace_prompt_tokens_total",] == 200
    assert seen["headrace_cached_prompt_tokens_total",] == 64
    assert seen["headrace_generation_tokens_total",] == 10
    assert seen["headrace_request_ttft_seconds_count",] == 2
    assert seen["headrace_request_itl_seconds_count",] == 8
    assert seen["headrace_request_e2e_seconds_count",] == 2


async def test_the_engines_load_is_shown() -> None:
    async with serving(FakeEngine()) as server:
        seen = await samples(server)
    assert seen["headrace_requests_running",] == 0
    assert seen["headrace_requests_waiting",] == 0
    assert seen["headrace_kv_blocks_used",] == 3
    assert seen["headrace_kv_blocks_total",] == 9
    assert seen["headrace_engine_steps_total",] == 17
    assert seen["headrace_preemptions_total",] == 0
    assert seen["vllm:num_requests_running",] == 0
    assert seen["vllm:kv_cache_usage_perc",] == 3 / 9
    assert "vllm:prefix_cache_hits_total" in {name for name, *_ in seen}


async def test_a_lost_engine_does_not_take_the_metrics_with_it() -> None:
    class Lost(FakeEngine):
        async def load(self) -> EngineLoad:
            raise EngineDiedError("gone")

    async with serving(Lost()) as server:
        await server.chat()
        seen = await samples(server)
        load = await server.client.get("/load")
    assert seen["headrace_http_requests_total", "/v1/chat/completions", "200"] == 1
    assert ("headrace_requests_running",) not in seen
    assert load.status_code == 503
    assert load.json()["error"]["code"] == "engine_died"
