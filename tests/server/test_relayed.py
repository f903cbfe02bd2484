"""What clients of a gateway see of an engine that gives text only, and what that engine sees of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.protocol import Lease
from router.registry.base import WorkerRecord
from server.access.credentials import Credentials
from server.access.keys import KeyEntry, digest_of
from server.access.quota import EVERYBODY
from server.access.usage_table import Limits, UsageTable
from server.config import RoutingConfig, ServeConfig
from server.fleet.fleet import Fleet
from server.foreign.settings import ForeignSettings
from server.openai.relayed import CHARACTERS_A_TOKEN
from tests.support.api_server import ApiServer, chat_body, chunks, serving_models
from tests.support.listed_registry import ListedRegistry
from tests.support.other_server import OtherServer, other_server
from tests.support.until import until

DONE = b"[DONE]"
A, B = "hr-a-0123456789abcdef", "hr-b-0123456789abcdef"
KEYS = Credentials(keys=(KeyEntry(digest_of(A), "a"), KeyEntry(digest_of(B), "b")), scope_secret="5a" * 32)


def part(text: str, reason: str | None = None) -> dict[str, object]:
    return {"id": "up-1", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}


USAGE = {
    "id": "up-1",
    "choices": [],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
}


@asynccontextmanager
async def door_to(
    *servers: OtherServer,
    credentials: Credentials | None = None,
    config: ServeConfig | None = None,
    usage: UsageTable | None = None,
) -> AsyncIterator[tuple[ApiServer, Fleet]]:
    """Serve in front of these, once all of them are known to be well."""
    records = [
        WorkerRecord(worker_id=f"w{number}", model="tiny", http_url=one.url, dialect="text")
        for number, one in enumerate(servers)
    ]
    fleet = Fleet(ListedRegistry(*records), RoutingConfig(), foreign=ForeignSettings(api_key="engines-key"))
    async with serving_models(fleet, credentials=credentials, config=config, usage=usage) as door:
        await fleet.opened.wait()
        pool = fleet.pools["tiny"]
        await until(lambda: [one.engine.is_ready for one in pool.links.values()] == [True] * len(servers), "all serve")
        yield door, fleet


async def test_a_stream_is_passed_on_and_counted() -> None:
    async with (
        other_server(events=[part("a"), part("b", "stop"), USAGE, DONE]) as upstream,
        door_to(upstream) as (door, fleet),
    ):
        headers = {
            "x-request-id": "mine",
            "authorization": "Bearer the-clients-own",
            "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01",
        }
        body = chat_body(stream=True, odd={"x": 1.50}, user="u")
        answer = await door.client.post("/v1/chat/completions", json=body, headers=headers)
        told = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event.startswith("data: ")]
        assert chunks(told) == [part("a"), part("b", "stop")]
        assert answer.headers["x-headrace-relay"] == "text"
        (seen,), (sent,) = upstream.seen, upstream.headers
        assert seen == {**body, "stream_options": {"include_usage": True}}
        assert sent["x-request-id"] == "mine"
        assert sent["traceparent"].startswith("00-" + "1" * 32)
        assert sent["authorization"] == "Bearer engines-key"
        assert door.service.metrics.generation_tokens._value.get() == 2
        assert door.service.metrics.cached_prompt_tokens._value.get() == 4
        asked = await door.chat(stream=True, stream_options={"include_usage": True})
        assert '"prompt_tokens":5' in asked.text.replace(" ", "")
        assert set(fleet.pools["tiny"].pool.in_flight.values()) == {0}
        assert fleet.pools["tiny"].pool.dispatcher.outcomes == {"ok": 2}


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([part("a")], "engine_died"),
        ([part("a"), {"error": {"message": "no", "code": 400}}, DONE], "invalid_value"),
        ([part("a"), b"nonsense"], "engine_died"),
    ],
    ids=["cut", "error", "nonsense"],
)
async def test_a_stream_that_goes_wrong_ends_in_one_error(events: list[object], code: str) -> None:
    async with other_server(events=events) as upstream, door_to(upstream) as (door, fleet):
        answer = await door.chat(stream=True)
        told = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event.startswith("data: ")]
        errors = [one for event in told if event != "[DONE]" and (one := json.loads(event).get("error"))]
        assert json.loads(told[0]) == part("a")
        assert json.loads(told[-1])["error"]["code"] == code
        assert len(errors) == 1
        assert set(fleet.pools["tiny"].pool.in_flight.values()) == {0}


async def test_a_stream_without_done_but_with_its_end_is_whole() -> None:
    async with other_server(events=[part("a", "stop")]) as upstream, door_to(upstream) as (door, _):
        assert (await door.chat(stream=True)).text.endswith("data: [DONE]\n\n")


async def test_refusals_of_the_server_are_told_in_our_form() -> None:
    async with other_server(status=400, body=b'{"detail":"bad"}') as upstream, door_to(upstream) as (door, _):
        answer = await door.chat()
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "bad")
        upstream.status, upstream.body = 429, b"{}"
        answer = await door.chat()
        assert answer.status_code == 429
        assert "retry-after" in answer.headers


async def test_what_has_not_begun_is_asked_of_another() -> None:
    body = json.dumps({"id": "x", **USAGE, "choices": [{"finish_reason": "stop"}]}).encode()
    async with (
        other_server(status=500, body=b"oops") as bad,
        other_server(body=body) as good,
        door_to(bad, good) as (door, fleet),
    ):
        for _ in range(6):
            answer = await door.chat()
            assert (answer.status_code, answer.content) == (200, body)
        pool = fleet.pools["tiny"]
        assert pool.supervisor.counters["retried"] == len(bad.seen)
        assert pool.pool.dispatcher.outcomes["fault"] == len(bad.seen)
        assert len(good.seen) == 6


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"kv_transfer_params": {"remote_host": "h"}}, "kv_transfer_params"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 3}, "stream_options"),
    ],
    ids=["transfer", "template", "stream", "options"],
)
async def test_what_is_unsafe_or_cannot_be_read_is_refused(fields: dict[str, Any], param: str) -> None:
    async with other_server() as upstream, door_to(upstream) as (door, _):
        answer = await door.chat(**fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert not upstream.seen


async def test_tenants_share_no_cache() -> None:
    body = json.dumps({**USAGE, "choices": [{"finish_reason": "stop"}]}).encode()
    async with other_server(body=body) as upstream, door_to(upstream, credentials=KEYS) as (door, _):
        for key in (A, A, B):
            headers = {"authorization": f"Bearer {key}"}
            await door.client.post("/v1/chat/completions", json=chat_body(cache_salt="s"), headers=headers)
        salts = [seen["cache_salt"] for seen in upstream.seen]
        assert salts[0] == salts[1] != salts[2]
        assert "s" not in salts


async def test_a_client_that_leaves_ends_the_request_upstream() -> None:
    async with other_server(events=[part("a")], stays_open=True) as upstream, door_to(upstream) as (door, fleet):
        async with door.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response:
            assert await anext(response.aiter_lines())
        await asyncio.wait_for(upstream.left.wait(), 30)
        await until(lambda: set(fleet.pools["tiny"].pool.in_flight.values()) == {0}, "its lease is released")


async def test_a_client_that_leaves_before_the_usage_comes_pays_what_it_got() -> None:
    config, usage = ServeConfig(tokens_per_minute=1000), UsageTable(clock=lambda: 50.0)
    async with (
        other_server(events=[part("a"), part("b")], stays_open=True) as upstream,
        door_to(upstream, config=config, usage=usage) as (door, fleet),
    ):
        body = chat_body(stream=True, max_tokens=9)
        async with door.client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            while '"b"' not in await anext(lines):
                pass
        await until(lambda: set(fleet.pools["tiny"].pool.in_flight.values()) == {0}, "its lease is released")
        (sent,) = upstream.seen
        prompt_tokens = len(json.dumps(sent, separators=(",", ":"))) // CHARACTERS_A_TOKEN
        await until(lambda: used_tokens(usage) == prompt_tokens + 2, "it has paid")
        upstream.status, upstream.body = 400, b'{"detail":"bad"}'
        assert (await door.chat()).status_code == 400
        assert used_tokens(usage) == prompt_tokens + 2, "what was refused is free"


def used_tokens(usage: UsageTable) -> float:
    return usage.used(EVERYBODY, Limits(tokens=1000)).tokens


async def test_the_header_says_the_priority_where_the_body_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({**USAGE, "choices": [{"finish_reason": "stop"}]}).encode()
    async with other_server(body=body) as upstream, door_to(upstream) as (door, fleet):
        pool = fleet.pools["tiny"].pool
        seen, place = list[int](), pool.place

        async def noting(*args: Any, **fields: Any) -> Lease:  # noqa: ANN401
            seen.append(fields["priority"])
            return await place(*args, **fields)

        monkeypatch.setattr(pool, "place", noting)
        headers = {"x-vllm-priority": "-3"}
        for fields in ({}, {"priority": 2}):
            await door.client.post("/v1/chat/completions", json=chat_body(**fields), headers=headers)
        assert seen == [-3, 2]
        headers = {"x-vllm-priority": "soon"}
        refused = await door.client.post("/v1/chat/completions", json=chat_body(), headers=headers)
        assert refused.status_code == 400


async def test_a_model_of_text_has_no_tokens() -> None:
    async with other_server() as upstream, door_to(upstream) as (door, _):
        answer = await door.post("/tokenize", {"model": "tiny", "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")
        other = await door.chat(model="none")
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
        (card,) = (await door.client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("tiny", None)
