"""Bodies are bounded: their structure before anything is built of it, their time, and the memory of all together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from pydantic import BaseModel, ValidationError
from starlette.types import Message

from engine.errors import PressureError, RequestError
from server import request_body
from server.errors import BodyTooLargeError, BodyTooSlowError, ClientGoneError
from server.openai.body import MAX_MEMBERS, MAX_STRINGS, parse_body
from server.openai.chat_body import MAX_MESSAGES, ChatBody
from server.openai.completion_body import CompletionBody
from server.openai.fields import GenerationBody
from server.openai.tokenize_body import DetokenizeBody, TokenizeBody
from server.request_body import FREE_BYTES, HELD_BODIES, Body, BodyMemory

SCOPE = {"headers": []}
LIMIT = 100_000


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


@pytest.mark.parametrize("model", [ChatBody, CompletionBody, TokenizeBody, DetokenizeBody])
@pytest.mark.parametrize("wrong", [[None] * 1000, [-1.5] * 1000, [{"a": 1}] * 1000, ["a"] * 1000, [[]] * 1000])
def test_no_field_keeps_a_fault_for_each_entry_of_a_list(model: type[BaseModel], wrong: list[object]) -> None:
    faults = 0
    for name in model.model_fields:
        try:
            model.model_validate({name: wrong})
        except ValidationError as error:
            faults += 1
            of_field = [one for one in error.errors(include_input=False) if one["loc"][0] == name]
            assert len(of_field) <= 2, name
    assert faults == len(model.model_fields)


class Sender:
    """What a client sends, as messages of ASGI; behind the last one nothing comes."""

    def __init__(self, *parts: bytes, complete: bool = True) -> None:
        self._messages: Iterator[Message] = iter(
            {"type": "http.request", "body": part, "more_body": not (complete and i == len(parts) - 1)}
            for i, part in enumerate(parts)
        )

    async def __call__(self) -> Message:
        for message in self._messages:
            return message
        await asyncio.Event().wait()
        raise AssertionError("not reached")


async def test_a_body_is_what_its_parts_are() -> None:
    memory = BodyMemory(LIMIT)
    body = Body(memory)
    await body.read(SCOPE, Sender(b"a" * 70_000, b"", b"b"))
    assert body.take() == b"a" * 70_000 + b"b"
    assert memory.held_bytes == 70_001 - FREE_BYTES
    body.release()
    body.release()
    assert memory.held_bytes == 0


@pytest.mark.parametrize("parts", [[b"a" * (LIMIT + 1)], [b"a" * LIMIT, b"a"], [b"a" * LIMIT] * 9])
async def test_a_body_over_the_limit_is_held_no_longer(parts: list[bytes]) -> None:
    memory = BodyMemory(LIMIT)
    body = Body(memory)
    with pytest.raises(BodyTooLargeError):
        await body.read(SCOPE, Sender(*parts))
    assert memory.held_bytes == 0


async def test_many_large_bodies_at_once_are_refused_and_small_ones_are_not() -> None:
    memory = BodyMemory(LIMIT)
    bodies = [Body(memory) for _ in range(100)]

    async def read(body: Body) -> bool:
        try:
            await body.read(SCOPE, Sender(b"a" * LIMIT))
        except PressureError:
            return False
        return True

    taken = sum([await read(body) for body in bodies])
    assert HELD_BODIES <= taken < 100
    assert memory.held_bytes <= HELD_BODIES * LIMIT
    await Body(memory).read(SCOPE, Sender(b"a" * FREE_BYTES))
    for body in bodies:
        body.release()
    assert memory.held_bytes == 0


async def test_a_body_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_TIMEOUT_S", 0.01)
    with pytest.raises(BodyTooSlowError):
        await Body(BodyMemory(LIMIT)).read(SCOPE, Sender(b"a", b"b", complete=False))


async def test_a_body_that_breaks_off_is_nobodys_fault() -> None:
    async def gone() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGoneError):
        await Body(BodyMemory(LIMIT)).read(SCOPE, gone)
