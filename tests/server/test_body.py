"""Bodies that are all structure are refused by a count before anything is built of them; large text is welcome."""

from __future__ import annotations

import json

import pytest

from engine.errors import RequestError
from server.openai.body import MAX_MEMBERS, MAX_STRINGS, parse_body
from server.openai.chat_body import MAX_MESSAGES, ChatBody
from server.openai.completion_body import CompletionBody
from server.openai.fields import GenerationBody


def many(unit: str, count: int) -> str:
    return ",".join([unit] * count)


def completion(fields: str) -> bytes:
    return b'{"model": "tiny", "prompt": "a", %b}' % fields.encode()


def chat(messages: str, more: str = "") -> bytes:
    return b'{"model": "tiny", "messages": [%b]%b}' % (messages.encode(), more.encode())


OVER = MAX_MEMBERS + 1


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (completion(f'"x": [{many("[]", OVER)}]'), CompletionBody),
        (completion(f'"x": [{many("{}", OVER)}]'), CompletionBody),
        (completion(",".join(f'"k{i}": 1' for i in range(OVER))), CompletionBody),
        (completion(f'"x": [{many(json.dumps(""), MAX_STRINGS + 1)}]'), CompletionBody),
        (completion(f'"x": {json.dumps(chr(92))}, "y": [{many("[]", OVER)}]'), CompletionBody),
        (completion(f'"x": {json.dumps(chr(34))}, "y": [{many("[]", OVER)}]'), CompletionBody),
        (completion(f'"x": {json.dumps(chr(92) + chr(34))}, "y": [{many("[]", OVER)}]'), CompletionBody),
        (chat(many("{}", OVER)), ChatBody),
        (chat('{"role": "user", "content": "a"}', f', "tools": [{many("{}", OVER)}]'), ChatBody),
    ],
)
async def test_a_body_of_structure_alone_is_refused_by_its_count(body: bytes, model: type[GenerationBody]) -> None:
    with pytest.raises(RequestError) as caught:
        await parse_body(body, model)
    assert caught.value.code == "request_too_large"


@pytest.mark.parametrize("text", ["{[:," * 100_000, '"' * 300_000, "\\" * 300_001, '\\"{' * 100_000, "\n" * 300_000])
async def test_text_is_no_structure_whatever_it_is_made_of(text: str) -> None:
    body = json.dumps({"model": "tiny", "prompt": text}).encode()
    assert (await parse_body(body, CompletionBody)).prompt == [text]


async def test_a_million_token_ids_are_no_structure() -> None:
    body = json.dumps({"model": "tiny", "prompt": [7] * 1_000_000}).encode()
    assert (await parse_body(body, CompletionBody)).prompt == [[7] * 1_000_000]


@pytest.mark.parametrize(
    ("body", "model", "param"),
    [
        (chat(many("1", 100_000)), ChatBody, "messages[0]"),
        (chat(many('{"role": "user", "content": ""}', MAX_MESSAGES + 1)), ChatBody, "messages"),
        (completion(f'"stop_token_ids": [{many("-1", 100_000)}]'), CompletionBody, "stop_token_ids[0]"),
        (completion(f'"stop": [{many("1", 100_000)}]'), CompletionBody, "stop"),
        (completion(f'"seed": [{many("1", 100_000)}]'), CompletionBody, "seed"),
        (completion('"seed": -1' + "0" * 4000), CompletionBody, "seed"),
        (b'{"model": "tiny", "prompt": [1,' + b"1," * 100_000 + b"-1]}", CompletionBody, "prompt"),
    ],
)
async def test_a_long_list_of_faults_costs_one_message(body: bytes, model: type[GenerationBody], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        await parse_body(body, model)
    assert caught.value.param == param
    assert len(str(caught.value)) < 500
