"""LangChain's models for OpenAI's protocol."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from langchain_core.exceptions import ModelAuthenticationError, ModelInvalidRequestError, ModelNotFoundError
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.serving import KEY, MODEL, Server
from tests.clients.shapes import QUESTION, City

MESSAGES = [SystemMessage("Be brief."), HumanMessage(QUESTION)]


def chat_model(server: Server, **settings: Any) -> ChatOpenAI:  # noqa: ANN401  (any of the client's settings)
    wanted = {"base_url": server.base_url, "api_key": KEY, "model": MODEL, "temperature": 0}
    return ChatOpenAI(**{**wanted, **settings})


@pytest.fixture(scope="module")
def chat(server: Server) -> ChatOpenAI:
    return chat_model(server)


def test_an_answer_streams_what_comes_whole_with_its_usage(server: Server, chat: ChatOpenAI) -> None:
    whole = chat.invoke(MESSAGES)
    assert "Paris" in whole.text
    assert whole.response_metadata["finish_reason"] == "stop"
    chunks = list(chat_model(server, stream_usage=True).stream(MESSAGES))
    assert len(chunks) > 3
    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    assert isinstance(streamed, AIMessageChunk)
    assert streamed.text == whole.text
    assert streamed.response_metadata["finish_reason"] == "stop"
    assert streamed.usage_metadata == whole.usage_metadata
    assert whole.usage_metadata["output_tokens"] > 0


def test_several_choices_and_several_prompts(server: Server, chat: ChatOpenAI) -> None:
    sampled = chat_model(server, temperature=1.2, n=3, seed=5, max_tokens=8)
    (choices,) = sampled.generate([MESSAGES]).generations
    assert len({choice.text for choice in choices}) > 1
    answers = chat.batch(["Say one.", "Say two."], max_tokens=3)
    assert [answer.usage_metadata["output_tokens"] for answer in answers] == [3, 3]


def test_a_stop_string_ends_the_text_in_front_of_it(chat: ChatOpenAI) -> None:
    assert chat.invoke(MESSAGES, stop=["Paris"]).text == "The capital of France is "


def test_logprobs_stand_beside_the_answer(chat: ChatOpenAI) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(MESSAGES, max_tokens=4)
    tokens = answer.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == answer.text
    assert [len(token["top_logprobs"]) for token in tokens] == [2] * 4


def test_structured_output_is_an_object_of_its_class(chat: ChatOpenAI) -> None:
    structured = chat.with_structured_output(City)
    found = structured.invoke(MESSAGES)
    assert isinstance(found, City)
    assert list(structured.stream(MESSAGES))[-1] == found


def test_raw_prompts_are_completed(server: Server) -> None:
    model = OpenAI(base_url=server.base_url, api_key=KEY, model=MODEL, temperature=0, max_tokens=2)
    whole = model.invoke("The capital of France is")
    assert "Paris" in whole
    assert "".join(model.stream("The capital of France is")) == whole
    result = model.generate(["One, two,", "Red, green,"])
    assert [len(choices) for choices in result.generations] == [1, 1]
    assert result.llm_output["token_usage"]["completion_tokens"] == 4


def test_refusals_are_exceptions_of_both_kinds(server: Server, chat: ChatOpenAI) -> None:
    stranger, unknown = chat_model(server, api_key="no-key-of-this-server"), chat_model(server, model="another")
    for model, change, kinds in (
        (stranger, {}, (openai.AuthenticationError, ModelAuthenticationError)),
        (unknown, {}, (openai.NotFoundError, ModelNotFoundError)),
        (chat, {"temperature": 9}, (openai.BadRequestError, ModelInvalidRequestError)),
    ):
        for call in (model.invoke, lambda messages, m=model, **settings: list(m.stream(messages, **settings))):
            with pytest.raises(kinds[0]) as caught:
                call(MESSAGES, **change)
            assert isinstance(caught.value, kinds[1])


async def test_a_stream_that_is_closed_is_aborted(server: Server, chat: ChatOpenAI) -> None:
    before = server.aborts()
    endless = chat.bind(extra_body={"ignore_eos": True})
    stream = endless.stream(MESSAGES)
    next(chunk for chunk in stream if chunk.text)
    stream.close()
    await server.wait_aborts(before + 1)
    stream = endless.astream(MESSAGES)
    await anext(chunk async for chunk in stream if chunk.text)
    await stream.aclose()
    await server.wait_aborts(before + 2)
