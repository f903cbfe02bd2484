"""`truncate_prompt_tokens`: the last tokens of a prompt stay, in completions, chat and /tokenize."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from server.config import ServeConfig
from tests.support.api_server import ApiServer, serving
from tests.support.fake_engine import MAX_MODEL_LEN, FakeEngine

LONG = "".join(chr(ord("a") + i % 26) for i in range(3 * MAX_MODEL_LEN))
CODEC = FakeEngine().codec
ALL_IDS = CODEC.encode(LONG, parse_special=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[ApiServer]:
    async with serving(FakeEngine()) as one:
        yield one


def ran_on(server: ApiServer) -> list[int]:
    engine = server.model.engine
    assert isinstance(engine, FakeEngine)
    return engine.seen[-1].prompt_ids


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("prompt", [LONG, ALL_IDS], ids=["text", "ids"])
@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 7}, 7),
        ({"truncate_prompt_tokens": 7.0}, 7),
        ({"truncate_prompt_tokens": MAX_MODEL_LEN - 1}, MAX_MODEL_LEN - 1),
        ({"truncate_prompt_tokens": -1, "max_tokens": 1}, MAX_MODEL_LEN - 1),
        ({"truncate_prompt_tokens": -1, "max_tokens": 100}, MAX_MODEL_LEN - 100),
        ({"truncate_prompt_tokens": -1}, MAX_MODEL_LEN - 16),
    ],
)
async def test_the_end_of_a_prompt_stays(
    server: ApiServer, prompt: object, fields: dict[str, object], kept: int
) -> None:
    answer = await server.complete(prompt=prompt, **fields)
    assert answer.status_code == 200, answer.text
    assert ran_on(server) == ALL_IDS[-kept:]
    assert answer.json()["usage"]["prompt_tokens"] == kept


@pytest.mark.asyncio(loop_scope="module")
async def test_a_short_prompt_stays_as_it_is(server: ApiServer) -> None:
    await server.complete(prompt="abc", truncate_prompt_tokens=100, max_tokens=1)
    assert ran_on(server) == CODEC.encode("abc", parse_special=True)
    await server.complete(prompt="abc", truncate_prompt_tokens=None, max_tokens=1)
    assert ran_on(server) == CODEC.encode("abc", parse_special=True)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_chat_and_tokenize_keep_the_same_tokens(server: ApiServer) -> None:
    messages = [{"role": "user", "content": LONG}]
    whole = (await server.post("/tokenize", {"messages": messages})).json()["tokens"]
    for wanted, kept in ((9, 9), (-1, MAX_MODEL_LEN - 1)):
        answer = await server.chat(messages=messages, truncate_prompt_tokens=wanted)
        assert answer.status_code == 200, answer.text
        assert ran_on(server) == whole[-kept:]
        tokenised = await server.post("/tokenize", {"messages": messages, "truncate_prompt_tokens": wanted})
        assert tokenised.json()["tokens"] == whole[-kept:]
    prompt = await server.post("/tokenize", {"prompt": LONG, "truncate_prompt_tokens": 3})
    assert prompt.json()["tokens"] == ALL_IDS[-3:]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_prompt_that_is_echoed_is_the_one_that_ran(server: ApiServer) -> None:
    answer = await server.complete(prompt=LONG, truncate_prompt_tokens=4, echo=True, logprobs=1, max_tokens=1)
    choice = answer.json()["choices"][0]
    assert choice["text"].startswith(LONG[-4:])
    assert choice["logprobs"]["tokens"][:4] == list(LONG[-4:])
    assert choice["logprobs"]["text_offset"][:4] == [0, 1, 2, 3]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("value", [0, -2, 2**63, 1.5, "3", True, MAX_MODEL_LEN + 1])
async def test_a_length_that_cannot_be_is_refused_by_name(server: ApiServer, value: object) -> None:
    for path, body in (
        ("/v1/completions", {"model": "tiny", "prompt": "a"}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
    ):
        answer = await server.post(path, {**body, "truncate_prompt_tokens": value})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.asyncio(loop_scope="module")
async def test_the_other_side_is_refused(server: ApiServer) -> None:
    for body in ({"prompt": "a"}, {"model": "tiny", "prompt": "a"}):
        path = "/v1/completions" if "model" in body else "/tokenize"
        assert (await server.post(path, {**body, "truncation_side": "left"})).status_code == 200
        refused = await server.post(path, {**body, "truncation_side": "right"})
        assert refused.json()["error"]["param"] == "truncation_side"


async def test_the_number_of_prompts_is_a_setting() -> None:
    async with serving(FakeEngine(), config=ServeConfig(max_prompts=3)) as server:
        assert (await server.complete(prompt=["a"] * 3)).status_code == 200
        assert (await server.complete(prompt=["a"] * 4)).json()["error"]["param"] == "prompt"
        assert (await server.complete(prompt=["a"] * 2, n=2)).json()["error"]["param"] == "n"
