"""OpenAI's client for Python, with its defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.clients.serving import KEY, MODEL, Server
from tests.clients.shapes import QUESTION, City

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
GREEDY = {"model": MODEL, "messages": MESSAGES, "temperature": 0}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.base_url, api_key=KEY) as client:
        yield client


def test_a_chat_streams_what_it_answers_and_counts_the_same(client: OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY)
    (choice,) = whole.choices
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    chunks = list(client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == choice.message.content
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_choices_differ_and_are_the_same_streamed(client: OpenAI) -> None:
    wanted = {"model": MODEL, "messages": MESSAGES, "temperature": 1.2, "n": 3, "seed": 5, "max_completion_tokens": 8}
    whole = client.chat.completions.create(**wanted)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert sorted(texts) == [0, 1, 2]
    assert len(set(texts.values())) > 1
    streamed = dict.fromkeys(texts, "")
    for chunk in client.chat.completions.create(**wanted, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize("stop", ["Paris", ["never said", "Paris"]])
def test_a_stop_string_ends_the_text_in_front_of_it(client: OpenAI, stop: str | list[str]) -> None:
    (choice,) = client.chat.completions.create(**GREEDY, stop=stop).choices
    assert choice.message.content == "The capital of France is "
    assert choice.finish_reason == "stop"


def test_logprobs_name_each_token_and_its_alternatives(client: OpenAI) -> None:
    wanted = {**GREEDY, "logprobs": True, "top_logprobs": 3, "max_tokens": 5}
    (choice,) = client.chat.completions.create(**wanted).choices
    tokens = choice.logprobs.content
    assert len(tokens) == 5
    assert bytes(byte for token in tokens for byte in token.bytes).decode() == choice.message.content
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob <= 0
    chunks = client.chat.completions.create(**wanted, stream=True)
    streamed = [token for chunk in chunks if (part := chunk.choices[0].logprobs) for token in part.content]
    assert streamed == tokens


def test_a_pydantic_model_is_parsed_whole_and_streamed(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(**GREEDY, response_format=City).choices[0].message.parsed
    assert isinstance(parsed, City)
    with client.chat.completions.stream(**GREEDY, response_format=City) as stream:
        assert any(event.type == "content.delta" for event in stream)
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_a_completion_echoes_prompts_of_texts_and_of_tokens(client: OpenAI) -> None:
    wanted = {"model": MODEL, "temperature": 0, "max_tokens": 2, "logprobs": 2, "echo": True}
    of_texts = client.completions.create(prompt=["The capital of France is", "One, two,"], **wanted)
    first, second = of_texts.choices
    assert first.text.startswith("The capital of France is Paris")
    assert second.text.startswith("One, two,")
    assert first.logprobs.token_logprobs[0] is None
    assert "".join(first.logprobs.tokens) == first.text
    raw = client.post("/tokenize", body={"prompt": "One, two,"}, cast_to=dict[str, object])
    of_tokens = client.completions.create(prompt=raw["tokens"], **wanted)
    assert of_tokens.choices[0].logprobs == second.logprobs
    chunks = client.completions.create(prompt="One, two,", stream=True, **wanted)
    assert "".join(chunk.choices[0].text for chunk in chunks) == second.text


def test_models_are_listed_and_found(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


REFUSED: dict[str, tuple[dict[str, object], type[openai.APIStatusError], str | None, str]] = {
    "model": ({"model": "another"}, openai.NotFoundError, "model", "model_not_found"),
    "value": ({"temperature": 9}, openai.BadRequestError, "temperature", "invalid_value"),
    "type": ({"n": "2"}, openai.BadRequestError, "n", "invalid_type"),
    "length": (
        {"messages": [{"role": "user", "content": "word " * 3000}]},
        openai.BadRequestError,
        "messages",
        "context_length_exceeded",
    ),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
        openai.BadRequestError,
        "response_format",
        "invalid_value",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_the_clients_own_exception(client: OpenAI, name: str, stream: bool) -> None:
    change, error, param, code = REFUSED[name]
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{**GREEDY, **change, "stream": stream})
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


def test_a_wrong_key_is_an_authentication_error(client: OpenAI) -> None:
    stranger = client.with_options(api_key="no-key-of-this-server")
    calls: list[Callable[[], object]] = [stranger.models.list, lambda: stranger.chat.completions.create(**GREEDY)]
    for call in calls:
        with pytest.raises(openai.AuthenticationError) as caught:
            call()
        assert caught.value.code == "invalid_api_key"


def test_an_api_that_is_not_served_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model=MODEL, input="text")
    assert caught.value.code == "unknown_url"


async def test_a_stream_that_is_closed_is_aborted(server: Server, client: OpenAI) -> None:
    before = server.aborts()
    with client.chat.completions.create(**GREEDY, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
    await server.wait_aborts(before + 1)


async def test_an_async_stream_that_is_closed_is_aborted(server: Server) -> None:
    before = server.aborts()
    async with AsyncOpenAI(base_url=server.base_url, api_key=KEY) as client:
        wanted = {**GREEDY, "stream": True, "extra_body": {"ignore_eos": True}}
        async with await client.chat.completions.create(**wanted) as stream:
            await anext(chunk async for chunk in stream if chunk.choices[0].delta.content)
        await server.wait_aborts(before + 1)
