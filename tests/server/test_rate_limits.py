"""Limits of API keys over HTTP: who is refused and how, what is counted, what the headers tell. Time is the test's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, RateLimitError

from engine.errors import PressureError
from server.access.credentials import Credentials
from server.access.keys import UNLIMITED, KeyEntry, digest_of
from server.access.quota import duration
from server.access.usage_table import UsageTable, table_bytes
from server.config import ServeConfig
from tests.support.api_server import ApiServer, chat_body, completion_body, serving
from tests.support.fake_engine import FakeEngine, Gate
from tests.support.until import until

KEY, OTHER, FREE = (f"hr-{name}-0123456789abcdef" for name in ("key", "other", "free"))
PROMPT_TOKENS = 8
PROMPT = list(range(100, 100 + PROMPT_TOKENS))


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def limited(
    engine: FakeEngine | None = None,
    *,
    requests: int | None = None,
    tokens: int | None = None,
    clock: Clock | None = None,
    **config: Any,  # noqa: ANN401
) -> AsyncIterator[ApiServer]:
    """Serve with these limits for KEY and OTHER, each; FREE has none."""
    keys = (
        KeyEntry(digest_of(KEY), "a"),
        KeyEntry(digest_of(OTHER), "a"),
        KeyEntry(digest_of(FREE), "a", UNLIMITED, UNLIMITED),
    )
    settings = ServeConfig(requests_per_minute=requests, tokens_per_minute=tokens, **config)
    usage = UsageTable(clock=clock or Clock())
    async with serving(engine or FakeEngine(), config=settings, credentials=Credentials(keys=keys), usage=usage) as it:
        yield it


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ask(server: ApiServer, key: str = KEY, **fields: object) -> httpx.Response:
    return await server.client.post(
        "/v1/completions", json=completion_body(**{"prompt": PROMPT, **fields}), headers=bearer(key)
    )


def told(response: httpx.Response) -> dict[str, str]:
    prefix = "x-ratelimit-"
    return {name.removeprefix(prefix): value for name, value in response.headers.items() if name.startswith(prefix)}


def remaining(response: httpx.Response) -> int:
    return int(told(response)["remaining-tokens"])


async def remaining_now(server: ApiServer) -> int:
    """A request that costs no tokens tells."""
    return remaining(await server.client.get("/v1/models", headers=bearer(KEY)))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0004, "0s"),
        (0.02, "20ms"),
        (1, "1s"),
        (7.66, "7.66s"),
        (59.9999, "1m0s"),
        (90.951, "1m30.951s"),
        (360, "6m0s"),
        (3723, "1h2m3s"),
    ],
)
def test_times_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


async def test_requests_over_the_limit_are_refused_until_the_bucket_has_drained() -> None:
    engine, clock = FakeEngine(), Clock()
    async with limited(engine, requests=3, clock=clock) as server:
        answers = [await ask(server) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
        assert len(engine.seen) == 3
        assert [told(answer)["remaining-requests"] for answer in answers] == ["2", "1", "0", "0", "0"]
        refused = answers[3]
        assert refused.json()["error"] == {
            "message": "Rate limit reached on requests per minute: Limit 3. Try again in 20s.",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }
        assert refused.headers["retry-after"] == "20"
        assert told(refused) == {"limit-requests": "3", "remaining-requests": "0", "reset-requests": "1m0s"}
        assert (await ask(server, OTHER)).status_code == 200, "another key of the same tenant has its own"
        assert [(await ask(server, FREE)).status_code for _ in range(5)] == [200] * 5
        clock.now_s += 20.0
        assert [(await ask(server)).status_code for _ in range(2)] == [200, 429]
        scraped = (await server.client.get("/metrics")).text
        assert 'headrace_rate_limited_total{limit="requests"} 3.0' in scraped


async def test_every_answer_of_a_limited_key_has_the_headers_and_no_other() -> None:
    async with limited(requests=100, tokens=1000) as server:
        for method, path, body in [
            ("GET", "/v1/models", None),
            ("GET", "/v1/nothing", None),
            ("GET", "/v1/completions", None),
            ("POST", "/tokenize", {"prompt": "a"}),
            ("POST", "/v1/completions", {"temperature": "hot"}),
            ("POST", "/v1/chat/completions", chat_body(stream=True)),
            ("POST", "/v1/chat/completions", chat_body(model="other")),
        ]:
            answer = await server.client.request(method, path, json=body, headers=bearer(KEY))
            assert set(told(answer)) == {
                f"{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")
            }, path
            assert re.fullmatch(r"(\d+m)?[\d.]+m?s", told(answer)["reset-requests"])
            assert told(await server.client.request(method, path, json=body, headers=bearer(FREE))) == {}
        for path in ("/health", "/ready", "/version", "/metrics", "/load"):
            assert told(await server.client.get(path, headers=bearer(KEY))) == {}
        assert told(await server.client.get("/v1/models", headers=bearer("hr-wrong-0123456789abcdef"))) == {}
        assert (await server.client.get("/v1/models", headers=bearer(KEY))).headers[
            "x-ratelimit-limit-tokens"
        ] == "1000"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_answer_may_use_is_held_while_it_runs_and_what_it_did_not_is_returned(stream: bool) -> None:
    engine = FakeEngine()
    engine.say("abcd")
    gate = engine.gate = Gate(after=2)
    async with limited(engine, tokens=100) as server:
        running = asyncio.create_task(ask(server, max_tokens=50, stream=stream))
        await gate.reached.wait()
        assert await remaining_now(server) == 100 - PROMPT_TOKENS - 50
        refused = await ask(server, max_tokens=40)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "tokens per minute: Limit 100, requested 48" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) == 4  # 6 of 100 tokens are missing
        assert len(engine.seen) == 1
        gate.opened.set()
        answer = await running
        assert remaining(answer) == 100 - PROMPT_TOKENS - 50, "the headers go out before all is counted"
        assert await remaining_now(server) == 100 - PROMPT_TOKENS - 5, "four letters and the end"
        assert (await ask(server, max_tokens=40)).status_code == 200


async def test_choices_and_prompts_of_one_request_are_held_together() -> None:
    engine = FakeEngine()
    gate = engine.gate = Gate(after=0)
    async with limited(engine, tokens=1000) as server:
        running = asyncio.create_task(ask(server, prompt=[PROMPT, PROMPT[:6]], n=3, max_tokens=10))
        await gate.reached.wait()
        assert await remaining_now(server) == 1000 - 8 - 6 - 2 * 3 * 10
        gate.opened.set()
        usage = (await running).json()["usage"]
        assert await remaining_now(server) == 1000 - usage["total_tokens"]


async def test_one_that_found_no_room_has_used_no_tokens() -> None:
    engine = FakeEngine()
    engine.failure = PressureError("full")
    async with limited(engine, tokens=100) as server:
        refused = await ask(server, max_tokens=50)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "server_is_overloaded")
        assert await remaining_now(server) == 100
        engine.failure, engine.fail_at = RuntimeError("broken"), 1  # type: ignore[assignment]
        assert (await ask(server, max_tokens=50)).status_code == 500
        assert await remaining_now(server) == 100 - PROMPT_TOKENS - 1


async def test_who_leaves_pays_for_what_was_made() -> None:
    engine = FakeEngine()
    gate = engine.gate = Gate(after=2)
    async with limited(engine, tokens=100) as server:
        task = asyncio.create_task(ask(server, max_tokens=50, stream=True))
        await gate.reached.wait()
        task.cancel()
        await engine.until(lambda: not engine.running)
        await until(lambda: not server.service.traffic.running, "the server has let go")
        assert await remaining_now(server) == 100 - PROMPT_TOKENS - 2


async def test_a_prompt_over_the_limit_is_never_let_in_and_a_long_answer_runs_alone() -> None:
    engine, clock = FakeEngine(), Clock()
    async with limited(engine, tokens=20, clock=clock) as server:
        never = await ask(server, prompt=[100] * 21, max_tokens=1)
        assert never.status_code == 429
        assert never.headers["x-should-retry"] == "false"
        assert "21 tokens" in never.json()["error"]["message"]
        assert (await ask(server, max_tokens=500)).status_code == 200
        left = await remaining_now(server)
        assert (await ask(server, max_tokens=500)).status_code == 429
        clock.now_s += 60.0
        assert await remaining_now(server) == 20 > left
        assert (await ask(server, max_tokens=500)).status_code == 200


async def test_an_answer_that_is_longer_than_the_limit_is_paid_back_later() -> None:
    engine, clock = FakeEngine(), Clock()
    engine.say("x" * 51)
    async with limited(engine, tokens=20, clock=clock) as server:
        assert (await ask(server, max_tokens=52)).status_code == 200
        assert await remaining_now(server) == 0
        clock.now_s += 120.0
        assert await remaining_now(server) == 0
        clock.now_s += 60.0 * (PROMPT_TOKENS + 52) / 20 - 120.0
        assert await remaining_now(server) == 20


async def test_the_openai_client_knows_the_error_and_comes_back_when_told() -> None:
    clock = Clock()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(limited(requests=1, tokens=1000, clock=clock))
        url = f"{server.url}/v1"
        client = await stack.enter_async_context(AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0))
        raw = await client.chat.completions.with_raw_response.create(**chat_body(max_tokens=5))  # type: ignore[call-overload]
        assert raw.parse().choices[0].finish_reason == "length"
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        for stream in (False, True):
            with pytest.raises(RateLimitError) as caught:
                await client.chat.completions.create(**chat_body(stream=stream))  # type: ignore[call-overload]
            assert (caught.value.status_code, caught.value.code) == (429, "rate_limit_exceeded")
            assert caught.value.response.headers["retry-after"] == "60"
            assert caught.value.response.headers["x-ratelimit-reset-requests"] == "1m0s"
        clock.now_s += 60.0
        assert (await client.chat.completions.create(**chat_body())).choices  # type: ignore[call-overload]


async def test_a_key_file_has_limits_of_its_own_and_changes_them(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        f"{KEY}: {{tenant: a, requests_per_minute: 2}}\n{OTHER}: b\n{FREE}: {{tenant: b, requests_per_minute: none}}\n"
    )
    config = ServeConfig(api_keys_file=str(path), requests_per_minute=1, tokens_per_minute=500)
    async with serving(FakeEngine(), config=config, usage=UsageTable(clock=Clock())) as server:
        for key, limit in ((KEY, "2"), (OTHER, "1"), (FREE, None)):
            answer = await ask(server, key)
            assert answer.status_code == 200
            assert told(answer).get("limit-requests") == limit
            assert told(answer)["limit-tokens"] == "500"
        assert (await ask(server, OTHER)).status_code == 429


async def test_without_keys_the_limit_is_of_all_together() -> None:
    config = ServeConfig(requests_per_minute=2)
    async with serving(FakeEngine(), config=config, usage=UsageTable(clock=Clock())) as server:
        statuses = [(await ask(server, key)).status_code for key in (KEY, OTHER, FREE)]
        assert statuses == [200, 200, 429]
        assert (await server.client.get("/health")).status_code == 200


async def test_two_processes_of_a_server_have_one_limit(tmp_path: Path) -> None:
    path, clock = tmp_path / "usage", Clock()
    with path.open("wb") as file:
        file.truncate(table_bytes(2))
    first, second = (UsageTable(path=path, processes=2, index=index, clock=clock) for index in range(2))
    config = ServeConfig(requests_per_minute=5, tokens_per_minute=1000)
    async with (
        serving(FakeEngine(), config=config, usage=first) as one,
        serving(FakeEngine(), config=config, usage=second) as other,
    ):
        answers = [await ask((one, other)[number % 2]) for number in range(8)]
        assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 3
        assert [told(answer)["remaining-requests"] for answer in answers[:5]] == ["4", "3", "2", "1", "0"]
        used = sum(answer.json()["usage"]["total_tokens"] for answer in answers[:5])
        assert {remaining(answer) for answer in answers[5:]} == {1000 - used}


async def test_a_limited_key_that_finds_the_server_full_has_used_nothing() -> None:
    engine = FakeEngine()
    engine.gate = Gate(after=0)
    async with limited(engine, requests=5, max_concurrent_requests=1) as server:
        running = asyncio.create_task(ask(server))
        await engine.gate.reached.wait()
        full = await ask(server)
        assert full.json()["error"]["code"] == "server_is_overloaded"
        assert told(full)["remaining-requests"] == "4"
        engine.gate.opened.set()
        assert (await running).status_code == 200
        assert told(await ask(server))["remaining-requests"] == "3"
