"""The server as its clients see it: OpenAI's own SDK, request ids, the API description."""

from __future__ import annotations

import openai
import pytest

from engine.errors import RequestFailedError
from tests.support.api_server import ApiServer, chat_body, serving
from tests.support.fake_engine import FakeEngine

HI: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi there"}]


def sdk(server: ApiServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")


async def test_the_sdk_chats_streamed_and_not() -> None:
    engine = FakeEngine()
    engine.say("Hello, 世界!")
    async with serving(engine) as server, sdk(server) as client:
        whole = await client.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2)
        stream = await client.chat.completions.create(
            model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == "Hello, 世界!"
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content is not None
    joined = b"".join(bytes(token.bytes or []) for token in whole.choices[0].logprobs.content[:-1])
    assert joined.decode() == "Hello, 世界!"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello, 世界!"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


async def test_the_sdks_stream_helper_accumulates_the_answer() -> None:
    engine = FakeEngine()
    engine.say("Hello!")
    async with (
        serving(engine) as server,
        sdk(server) as client,
        client.chat.completions.stream(model="tiny", messages=HI) as stream,
    ):
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello!"
    assert final.choices[0].finish_reason == "stop"


async def test_the_sdk_completes_text() -> None:
    engine = FakeEngine()
    async with serving(engine) as server, sdk(server) as client:
        answer = await client.completions.create(model="tiny", prompt=["abc", "def"], n=2, seed=0, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["abc", "bca", "def", "efd"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["a", "b", "c", "<|im_end|>"]


async def test_the_sdk_lists_models() -> None:
    async with serving(FakeEngine(model="org/tiny")) as server, sdk(server) as client:
        models = [model async for model in client.models.list()]
        one = await client.models.retrieve("org/tiny")
        with pytest.raises(openai.NotFoundError) as raised:
            await client.models.retrieve("other")
    assert [model.id for model in models] == ["org/tiny"]
    assert one.owned_by == "headrace"
    assert one.max_model_len == 512  # type: ignore[attr-defined]
    assert raised.value.code == "model_not_found"


async def test_the_sdk_raises_what_it_has_names_for() -> None:
    engine = FakeEngine()
    async with serving(engine) as server, sdk(server) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=HI, temperature=3)
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="other", messages=HI)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    assert unknown.value.param == "model"
    assert engine.seen == []


async def test_the_sdk_repeats_nothing_that_cannot_succeed() -> None:
    engine = FakeEngine()
    engine.failure = RequestFailedError("The step failed.")
    async with serving(engine) as server, sdk(server) as client:
        with pytest.raises(openai.InternalServerError, match="The step failed"):
            await client.chat.completions.create(model="tiny", messages=HI)
    assert len(engine.seen) == 1


async def test_the_sdk_raises_an_error_inside_a_stream() -> None:
    engine = FakeEngine()
    engine.say("Hello")
    engine.failure, engine.fail_at = RequestFailedError("The step failed."), 2
    async with serving(engine) as server, sdk(server) as client:
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="The step failed"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("given", ["a b", "x" * 129, "", "<script>"])
async def test_a_request_id_that_is_not_sane_is_replaced(given: str) -> None:
    async with serving(FakeEngine()) as server:
        response = await server.client.get("/health", headers={"x-request-id": given})
    assert response.headers["x-request-id"].startswith("req-")


async def test_every_response_has_a_request_id_of_its_own() -> None:
    async with serving(FakeEngine()) as server:
        responses = [
            await server.client.get("/nowhere"),
            await server.client.get("/v1/completions"),
            await server.chat(),
            await server.chat(stream=True),
            await server.chat(model="x"),
            await server.client.get("/metrics"),
        ]
    assert len({response.headers["x-request-id"] for response in responses}) == len(responses)


async def test_there_is_one_header_of_a_kind_and_no_cross_origin_access() -> None:
    async with serving(FakeEngine()) as server:
        response = await server.client.post("/v1/chat/completions", json=chat_body(), headers={"origin": "http://x"})
        preflight = await server.client.options("/v1/chat/completions", headers={"origin": "http://x"})
    names = [name.lower() for name, _ in response.headers.raw]
    assert len(names) == len(set(names))
    assert not any(name.startswith("access-control") for name in [*response.headers, *preflight.headers])


async def test_the_api_description_has_the_bodies() -> None:
    async with serving(FakeEngine()) as server:
        schema = (await server.client.get("/openapi.json")).json()
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")):
        body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert field in body["properties"]
        assert set(body["required"]) == {"model", field}
    assert "Message" in schema["components"]["schemas"]
