"""/tokenize and /detokenize: the ids that a completion runs on, and the text of ids."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.api_server import ApiServer, serving
from tests.support.fake_engine import MAX_MODEL_LEN, FakeEngine
from tests.support.tiny_text import VOCAB_SIZE

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi \u00fc \U0001f600"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[ApiServer]:
    async with serving(FakeEngine()) as one:
        yield one


def engine_of(server: ApiServer) -> FakeEngine:
    engine = server.model.engine
    assert isinstance(engine, FakeEngine)
    return engine


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize("special", [True, False])
async def test_a_prompts_ids_are_those_that_a_completion_runs_on(server: ApiServer, prefix: str, special: bool) -> None:
    text = "Hello <|im_end|> w\u00f6rld"
    answer = await server.post(f"{prefix}/tokenize", {"model": "tiny", "prompt": text, "add_special_tokens": special})
    assert answer.status_code == 200
    await server.complete(prompt=text, add_special_tokens=special, max_tokens=1)
    ids = engine_of(server).seen[-1].prompt_ids
    assert answer.json() == {"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids, "token_strs": None}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "options", [{}, {"add_generation_prompt": False}, {"add_generation_prompt": True}, {"continue_final_message": True}]
)
async def test_messages_become_the_ids_that_a_chat_runs_on(server: ApiServer, options: dict[str, bool]) -> None:
    answer = await server.post("/tokenize", {"messages": MESSAGES, **options})
    assert answer.status_code == 200, answer.text
    await server.chat(messages=MESSAGES, max_tokens=1, **options)
    assert answer.json()["tokens"] == engine_of(server).seen[-1].prompt_ids


@pytest.mark.asyncio(loop_scope="module")
async def test_tokens_are_named_one_by_one_when_asked(server: ApiServer) -> None:
    answer = (await server.post("/tokenize", {"prompt": "Hi <|im_end|>", "return_token_strs": True})).json()
    assert len(answer["token_strs"]) == answer["count"] == len(answer["tokens"])
    assert "".join(answer["token_strs"]).endswith("Hi <|im_end|>")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("text", ["", "a", "Hi \u00fc \U0001f600", "<|im_end|>", "  two  blanks\n"])
async def test_detokenize_undoes_tokenize(server: ApiServer, text: str) -> None:
    tokens = (await server.post("/tokenize", {"prompt": text, "add_special_tokens": False})).json()["tokens"]
    for path in ("/detokenize", "/v1/detokenize"):
        answer = await server.post(path, {"model": "tiny", "tokens": tokens})
        assert answer.json() == {"prompt": text}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, 400, None),
        ("/tokenize", {"prompt": "a" * 1_000_001}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 1_000_001}]}, 400, "messages"),
        ("/tokenize", {"messages": [1] * 10_000}, 400, "messages[0]"),
        ("/detokenize", {"tokens": [-1] * 10_000}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1] * (2**20 + 1)}, 400, "tokens"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "x", "content": "a"}]}, 400, "messages[0].role"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, None),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "yes"}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", [], 400, None),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1, VOCAB_SIZE]}, 400, "tokens"),
        ("/detokenize", {"tokens": [4294967295]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_bad_input_is_refused_with_its_name_and_the_next_request_works(
    server: ApiServer, path: str, body: object, status: int, param: str | None
) -> None:
    content = json.dumps(body)  # ASCII, so that it can hold half a surrogate pair
    answer = await server.client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
    assert "'None'" not in answer.json()["error"]["message"], "no client has sent a field of this name"
    assert (await server.client.get("/health")).status_code == 200
    assert (await server.post("/tokenize", {"prompt": "a"})).status_code == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_a_text_longer_than_the_window_is_counted_all_the_same(server: ApiServer) -> None:
    text = "x" * (3 * MAX_MODEL_LEN)
    assert (await server.post("/tokenize", {"prompt": text})).json()["count"] >= len(text)
    messages = [{"role": "user", "content": text}]
    assert (await server.post("/tokenize", {"messages": messages})).json()["count"] >= len(text)


@pytest.mark.asyncio(loop_scope="module")
async def test_unknown_fields_are_ignored_and_named(server: ApiServer) -> None:
    answer = await server.post("/tokenize", {"prompt": "a", "foo": 1, "user": "u", "temperature": None})
    assert answer.status_code == 200
    assert answer.headers["x-ignored-params"] == "foo"


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if loud %}!{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


async def test_what_the_template_takes_can_be_given() -> None:
    engine = FakeEngine(template=TEMPLATE)
    async with serving(engine) as server:

        async def text(**fields: object) -> str:
            answer = await server.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}], **fields})
            assert answer.status_code == 200, answer.text
            return engine.codec.decode(answer.json()["tokens"])

        assert await text() == "Hi"
        assert await text(chat_template_kwargs={"loud": True}) == "!Hi"
        assert await text(tools=[{"type": "function"}]) == '[{"type": "function"}]Hi'
        await server.chat(messages=MESSAGES, max_tokens=1, chat_template_kwargs={"loud": True})
        answer = await server.post("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"loud": True}})
        assert answer.json()["tokens"] == engine.seen[-1].prompt_ids
        for fields, param in (
            ({"prompt": "a", "tools": [{}]}, "tools"),
            ({"prompt": "a", "chat_template_kwargs": {"loud": True}}, "chat_template_kwargs"),
            ({"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
            ({"messages": MESSAGES, "chat_template_kwargs": []}, "chat_template_kwargs"),
            ({"messages": MESSAGES, "tools": {}}, "tools"),
            ({"messages": MESSAGES, "tools": [1]}, "tools[0]"),
            ({"messages": MESSAGES, "tools": [{}] * 129}, "tools"),
        ):
            answer = await server.post("/tokenize", fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_tools_are_refused_where_the_template_knows_none() -> None:
    async with serving(FakeEngine()) as server:
        answer = await server.post("/tokenize", {"messages": MESSAGES, "tools": [{"type": "function"}]})
        assert answer.status_code == 400
        assert answer.json()["error"] == {
            "message": "The model's chat template knows no tools.",
            "type": "invalid_request_error",
            "param": "tools",
            "code": "unsupported_parameter",
        }
        assert (await server.post("/tokenize", {"messages": MESSAGES, "tools": []})).status_code == 200


async def test_a_model_without_a_template_tokenises_prompts_only() -> None:
    async with serving(FakeEngine(with_template=False)) as server:
        assert (await server.post("/tokenize", {"messages": MESSAGES})).status_code == 400
        assert (await server.post("/tokenize", {"prompt": "a"})).status_code == 200
