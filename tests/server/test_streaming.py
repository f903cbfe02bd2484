"""Streams: order of chunks, equality with the whole answer, keep-alive, and how they end."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import EngineDiedError, PressureError, RequestFailedError
from engine.protocol import TokenOutput
from server.config import ServeConfig
from tests.support.api_server import ApiServer, chat_body, chunks, completion_body, event_data, serving
from tests.support.fake_engine import FakeEngine, Gate
from tests.support.tiny_text import byte_ids

CHAT = "/v1/chat/completions"


async def test_chunks_come_in_the_order_of_the_api() -> None:
    engine = FakeEngine()
    engine.say("Hey")
    async with serving(engine) as server:
        response = await server.post(CHAT, chat_body(stream=True, stream_options={"include_usage": True}))
    events = chunks(event_data(response.text))
    choices = [event["choices"] for event in events]
    assert [choice[0]["delta"] for choice in choices[:-1]] == [
        {"role": "assistant", "content": "", "refusal": None}, {"content": "H"}, {"content": "e"}, {"content": "y"}, {},
    ]  # fmt: skip
    assert [choice[0]["finish_reason"] for choice in choices[:-1]] == [None, None, None, None, "stop"]
    assert all("logprobs" in choice[0] for choice in choices[:-1])
    assert choices[-1] == []
    assert [event["usage"] for event in events[:-1]] == [None] * 5
    assert events[-1]["usage"]["completion_tokens"] == 4
    assert {(event["id"], event["created"], event["object"]) for event in events} == {
        (events[0]["id"], events[0]["created"], "chat.completion.chunk")
    }
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["transfer-encoding"] == "chunked"
    assert "content-length" not in response.headers


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body()), ("/v1/completions", completion_body())])
async def test_no_usage_unless_it_was_asked_for(path: str, body: dict[str, object]) -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        events = chunks(await server.events(path, body | {"stream": True}))
    assert all("usage" not in event for event in events)
    assert all(event["choices"] for event in events)


async def test_each_choice_has_one_role_chunk_and_one_finish() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        events = chunks(await server.events(CHAT, chat_body(stream=True, n=4)))
    choices = [event["choices"][0] for event in events]
    assert sorted(choice["index"] for choice in choices if "role" in choice["delta"]) == [0, 1, 2, 3]
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"]) == [0, 1, 2, 3]


TEXTS = st.text(st.sampled_from("ab é漢🙂\n\u2028\u0085<|>"), min_size=1, max_size=24)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=TEXTS,
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    stop=st.lists(TEXTS.map(lambda text: text[:3]), max_size=3),
    limit=st.integers(1, 100),
    include_stop=st.booleans(),
    n=st.integers(1, 2),
)
async def test_a_stream_says_what_the_whole_answer_says(
    shared: ApiServer, text: str, cuts: list[int], stop: list[str], limit: int, include_stop: bool, n: int
) -> None:
    engine = shared.model.engine
    assert isinstance(engine, FakeEngine)
    engine.say(text)
    engine.cuts = cuts
    body = chat_body(max_tokens=limit, stop=stop, include_stop_str_in_output=include_stop, n=n, logprobs=True)
    whole = (await shared.post(CHAT, body)).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = chunks(await shared.events(CHAT, body | options))
    engine.cuts = [1]
    other_cuts = (await shared.post(CHAT, body)).json()

    for index, choice in enumerate(whole["choices"]):
        parts = [one for event in events for one in event["choices"] if one["index"] == index]
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        assert all(part["delta"].get("content") != "" for part in parts[1:])
        tokens = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert tokens == choice["logprobs"]["content"]
    assert events[-1]["usage"] == whole["usage"]
    assert other_cuts["choices"] == whole["choices"]
    assert other_cuts["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


@pytest.fixture
async def shared():  # noqa: ANN201
    async with serving(FakeEngine()) as server:
        yield server


async def test_no_chunk_holds_half_a_character_or_a_line_end_of_unicode() -> None:
    engine = FakeEngine()
    text = "a🙂漢\u2028\u2029\u0085é"
    engine.say(text)
    async with serving(engine) as server:
        response = await server.post(CHAT, chat_body(stream=True))
    assert not set(response.text) & {"\ufffd", "\u2028", "\u2029", "\u0085"}
    deltas = [event["choices"][0]["delta"].get("content", "") for event in chunks(event_data(response.text))]
    assert deltas == ["", *text, ""]


async def test_a_character_cut_by_the_limit_is_the_same_streamed_and_not() -> None:
    engine = FakeEngine()
    engine.say("a🙂")
    async with serving(engine) as server:
        whole = (await server.chat(max_tokens=3)).json()
        events = chunks(await server.events(CHAT, chat_body(max_tokens=3, stream=True)))
    streamed = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert streamed == whole["choices"][0]["message"]["content"] == "a\ufffd"


async def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    engine = FakeEngine()
    engine.say("ABC DEFGHIJ K")
    async with serving(engine) as server:
        events = chunks(await server.events(CHAT, chat_body(stream=True, stop="DEFGHIJ")))
    assert [event["choices"][0]["delta"].get("content") for event in events] == ["", "A", "B", "C", " ", None]
    assert list(engine.finished.values()) == [len("ABC DEFGHIJ")]


async def test_a_refusal_of_the_engine_is_a_status_and_not_a_stream() -> None:
    engine = FakeEngine()
    engine.failure = PressureError("The queue is full.", retry_after_s=300)
    async with serving(engine) as server:
        for n in (1, 3):
            response = await server.chat(stream=True, n=n)
            assert response.status_code == 429
            assert response.headers["content-type"] == "application/json"
            assert response.headers["retry-after"] == "60"
            assert response.json()["error"]["code"] == "server_is_overloaded"
    assert engine.running == set()


@pytest.mark.parametrize("error", [RequestFailedError("The step failed."), EngineDiedError("It is gone.")])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_failure_inside_a_stream_is_its_last_event(error: Exception, n: int) -> None:
    engine = FakeEngine()
    engine.say("Hello")
    engine.failure, engine.fail_at = error, 2  # type: ignore[assignment]
    async with serving(engine) as server:
        response = await server.chat(stream=True, n=n)
        events = event_data(response.text)
        engine.failure = None
        assert (await server.chat()).status_code == 200
    assert response.status_code == 200
    assert "[DONE]" not in events
    assert json.loads(events[-1])["error"]["message"] == str(error)
    assert sum("error" in event for event in events) == 1
    assert all(json.loads(event)["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert engine.running == set()


@pytest.mark.parametrize("reason", ["error", "abort"])
async def test_an_end_by_the_engine_is_told_as_an_error(reason: str) -> None:
    engine = FakeEngine()
    engine.say("Hello")
    engine.terminal = TokenOutput("x", 0, 5, [], reason, error="NaN in the logits", error_code="nan")  # type: ignore[arg-type]
    async with serving(engine) as server:
        whole = await server.chat()
        events = await server.events(CHAT, chat_body(stream=True))
    assert whole.status_code == 500
    assert whole.headers["x-should-retry"] == "false"
    assert whole.json()["error"] == {
        "message": "NaN in the logits", "type": "server_error", "param": None, "code": "nan",
    }  # fmt: skip
    assert json.loads(events[-1]) == whole.json()


@pytest.mark.parametrize("code", ["invalid_value", "unsupported_parameter"])
async def test_a_fault_of_the_request_that_shows_late_is_not_told_as_the_servers(code: str) -> None:
    engine = FakeEngine()
    engine.say("Hello")
    engine.terminal = TokenOutput("x", 0, 5, [], "error", error="no token is left", error_code=code)
    async with serving(engine) as server:
        whole = await server.chat()
        events = await server.events(CHAT, chat_body(stream=True))
    assert whole.status_code == 400
    assert whole.json()["error"] == {
        "message": "no token is left", "type": "invalid_request_error", "param": None, "code": code,
    }  # fmt: skip
    assert json.loads(events[-1]) == whole.json()


async def test_an_exception_nobody_foresaw_is_an_internal_error_without_details() -> None:
    engine = FakeEngine()

    def fail(request: object) -> list[int]:
        raise ZeroDivisionError("secret detail")

    engine.reply = fail
    async with serving(engine) as server:
        response = await server.chat()
        engine.reply = engine.echo
        assert (await server.chat()).status_code == 200
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text


async def test_a_silent_stream_is_kept_alive_by_comments() -> None:
    engine = FakeEngine()
    engine.say("Hello")
    gate = engine.gate = Gate(after=0)
    async with (
        serving(engine, config=ServeConfig(sse_keep_alive_s=0.01)) as server,
        server.client.stream("POST", CHAT, json=chat_body(stream=True)) as response,
    ):
        assert response.status_code == 200  # although no token has come
        lines = response.aiter_lines()
        assert [await anext(lines) for _ in range(4)] == [": keep-alive", "", ": keep-alive", ""]
        gate.opened.set()
        text = "\n".join([line async for line in lines])
    assert chunks(event_data(text))[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_refusal_after_a_keep_alive_is_an_error_event() -> None:
    engine = FakeEngine()
    gate = engine.gate = Gate(after=0)

    class Late(PressureError):
        pass

    async with (
        serving(engine, config=ServeConfig(sse_keep_alive_s=0.01)) as server,
        server.client.stream("POST", CHAT, json=chat_body(stream=True)) as response,
    ):
        lines = response.aiter_lines()
        assert await anext(lines) == ": keep-alive"
        engine.failure, engine.fail_at = Late("Too late."), 1
        gate.opened.set()
        text = "\n".join([line async for line in lines])
    assert "[DONE]" not in text
    assert "Too late." in text


async def test_concurrent_streams_do_not_mix() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:

        async def one(number: int) -> str:
            prompt = f"stream {number:02d}"
            events = chunks(await server.events("/v1/completions", completion_body(prompt=prompt, stream=True, seed=0)))
            assert "".join(event["choices"][0]["text"] for event in events) == prompt[-12:]
            return events[0]["id"]

        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=32)):
            ids = await asyncio.gather(*(one(number) for number in range(32)))
    assert len(set(ids)) == 32


async def test_one_byte_tokens_are_whole_text() -> None:
    engine = FakeEngine()
    engine.reply = lambda request: byte_ids(b"\xff\xfeok")
    async with serving(engine) as server:
        response = await server.chat()
    assert response.json()["choices"][0]["message"]["content"] == "\ufffd\ufffdok"
