"""OpenAI's own Python client against the real server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI

from tests.support.headrace_server import HeadraceServer, headrace

MODEL = "tiny"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeadraceServer]:
    flags = {"served_model_name": MODEL, "threads": 1, "numerics": "invariant", "max_model_len": 256}
    with headrace(tmp_path_factory.mktemp("sdk"), tiny_model, **flags) as server:
        yield server


@pytest.fixture
async def client(server: HeadraceServer) -> AsyncIterator[AsyncOpenAI]:
    await server.wait_ready()
    async with AsyncOpenAI(base_url=f"{await server.url()}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_a_chat_streams_what_it_answers(client: AsyncOpenAI) -> None:
    wanted = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 30, "logprobs": True}
    whole = await client.chat.completions.create(**wanted)  # type: ignore[call-overload]
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(  # type: ignore[call-overload]
            **wanted, stream=True, stream_options={"include_usage": True}
        )
    ]
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == choice.finish_reason
    streamed = [token for chunk in chunks[:-1] if (part := chunk.choices[0].logprobs) for token in part.content]
    assert [token.logprob for token in streamed] == [token.logprob for token in choice.logprobs.content]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == len(streamed)


async def test_completions_of_several_prompts_and_choices(client: AsyncOpenAI) -> None:
    wanted = {"model": MODEL, "prompt": ["One", "Two"], "n": 2, "seed": 3, "max_tokens": 12, "temperature": 1.0}
    whole = await client.completions.create(**wanted, logprobs=2)  # type: ignore[call-overload]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage.prompt_tokens == 6
    texts = dict.fromkeys(range(4), "")
    async for chunk in await client.completions.create(**wanted, stream=True):  # type: ignore[call-overload]
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert len(set(texts.values())) == 4


async def test_models_are_listed_and_found(client: AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    assert model.id == MODEL
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("another")


@pytest.mark.parametrize(
    ("change", "error", "param", "code"),
    [
        ({"model": "another"}, openai.NotFoundError, "model", "model_not_found"),
        ({"temperature": 9}, openai.BadRequestError, "temperature", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": "x" * 400}]},
            openai.BadRequestError,
            "messages",
            "context_length_exceeded",
        ),
        ({"max_completion_tokens": 0}, openai.BadRequestError, "max_completion_tokens", "invalid_value"),
        ({"n": "2"}, openai.BadRequestError, "n", "invalid_type"),
    ],
)
async def test_errors_are_the_clients_own(
    client: AsyncOpenAI, change: dict[str, object], error: type[openai.APIStatusError], param: str, code: str
) -> None:
    with pytest.raises(error) as caught:
        await client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **change})  # type: ignore[call-overload]
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.request_id is not None
