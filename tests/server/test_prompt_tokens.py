"""What answers tell of prompts and token ids: echo, prompt_logprobs, return_token_ids, stop reasons, running usage."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.protocol import SamplingParams
from tests.support.api_server import ApiServer, chat_body, chunks, completion_body, serving
from tests.support.fake_engine import FakeEngine
from tests.support.tiny_text import EOS_ID, VOCAB_SIZE, byte_ids

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def joined(parts: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """One choice of a streamed completion, put together."""
    whole: dict[str, Any] = {"text": "", "logprobs": {name: [] for name in LISTS}, "token_ids": []}
    for part in parts:
        for choice in part["choices"]:
            if choice["index"] != index:
                continue
            whole["text"] += choice["text"]
            for name in LISTS:
                whole["logprobs"][name] += (choice["logprobs"] or {}).get(name, [])
            whole["token_ids"] += choice.get("token_ids", [])
            whole |= {key: choice[key] for key in ("finish_reason", "stop_reason", "prompt_token_ids") if key in choice}
    return whole


async def whole_and_streamed(server: ApiServer, **fields: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first choice of a completion, and the same put together from a stream."""
    whole = await server.complete(seed=0, **fields)
    assert whole.status_code == 200, whole.text
    parts = chunks(await server.events("/v1/completions", completion_body(seed=0, stream=True, **fields)))
    return whole.json()["choices"][0], joined(parts)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("prompt", ["Hi thére, the end", byte_ids("Hi thére".encode()), [1, *byte_ids(b"ab"), 2]])
async def test_an_echo_has_four_lists_of_one_length_that_begin_with_the_prompt(prompt: Any, max_tokens: int) -> None:  # noqa: ANN401
    engine = FakeEngine()
    engine.say("x" * 40)
    async with serving(engine) as server:
        choice, streamed = await whole_and_streamed(
            server, prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens, ignore_eos=True
        )
    ids = engine.seen[0].prompt_ids
    logprobs = choice["logprobs"]
    assert {len(logprobs[name]) for name in LISTS} == {len(ids) + max_tokens}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value == -0.25 for value in logprobs["token_logprobs"][1:])
    assert logprobs["tokens"][: len(ids)] == [engine.codec.token_text(token) for token in ids]
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    shown = prompt if isinstance(prompt, str) else engine.codec.decode(prompt, show_special=True)
    assert choice["text"].startswith(shown)
    assert logprobs["text_offset"][0] == 0
    if max_tokens:
        assert logprobs["text_offset"][len(ids)] == len(shown)
    assert choice["finish_reason"] == "length"
    assert streamed["text"] == choice["text"]
    assert streamed["logprobs"] == logprobs


TEXTS = st.text(st.sampled_from("ab é漢🙂\n\u2028"), min_size=1, max_size=16)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=TEXTS,
    prompt=TEXTS | st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    stop=st.lists(TEXTS.map(lambda text: text[:3]), max_size=3),
    fields=st.fixed_dictionaries(
        {
            "echo": st.booleans(),
            "logprobs": st.none() | st.integers(0, 3),
            "return_token_ids": st.booleans(),
            "include_stop_str_in_output": st.booleans(),
            "skip_special_tokens": st.booleans(),
            "max_tokens": st.integers(0, 40),
        }
    ),
)
async def test_a_streamed_completion_tells_what_the_whole_one_tells(
    shared: ApiServer, said: str, prompt: str | list[int], cuts: list[int], stop: list[str], fields: dict[str, Any]
) -> None:
    engine = shared.model.engine
    assert isinstance(engine, FakeEngine)
    engine.say(said)
    engine.cuts = cuts
    choice, streamed = await whole_and_streamed(shared, prompt=prompt, stop=stop, **fields)
    entries = streamed.pop("logprobs")
    if fields["logprobs"] is not None:
        assert entries == choice["logprobs"]
        if fields["return_token_ids"]:
            echoed = len(choice["prompt_token_ids"]) if fields["echo"] else 0
            assert len(entries["tokens"]) == echoed + len(choice["token_ids"])
    if not fields["return_token_ids"]:
        assert streamed.pop("token_ids") == []
    assert streamed == {name: value for name, value in choice.items() if name not in ("index", "logprobs")}


@pytest.fixture
async def shared() -> AsyncIterator[ApiServer]:
    async with serving(FakeEngine()) as server:
        yield server


async def test_an_echo_alone_samples_nothing() -> None:
    async with serving(FakeEngine()) as server:
        answer = (await server.complete(prompt=["one", "two"], n=2, echo=True, max_tokens=0)).json()
        engine: FakeEngine = server.model.engine  # type: ignore[assignment]
    assert [choice["text"] for choice in answer["choices"]] == ["one", "one", "two", "two"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    assert answer["usage"]["completion_tokens"] == 0
    assert {request.sampling.max_tokens for request in engine.seen} == {0}
    assert {request.prompt_logprobs for request in engine.seen} == {None}


async def test_the_shape_that_lm_eval_reads() -> None:
    """It sums token_logprobs over a continuation and compares each with the best of its top_logprobs."""
    async with serving(FakeEngine()) as server:
        body = completion_body(prompt=[byte_ids(b"abcd")], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=7)
        choice = (await server.post("/v1/completions", body)).json()["choices"][0]
    logprobs = choice["logprobs"]["token_logprobs"][2:-1]
    tops = choice["logprobs"]["top_logprobs"][2:-1]
    assert len(logprobs) == 2
    assert sum(logprobs) == -0.5
    assert all(value == max(top.values()) for value, top in zip(logprobs, tops, strict=True))


async def test_prompt_logprobs_are_told_by_id_in_chat_and_completions() -> None:
    async with serving(FakeEngine()) as server:
        completion = (await server.complete(prompt="ab", prompt_logprobs=1, max_tokens=2)).json()["choices"][0]
        chat = (await server.chat(prompt_logprobs=0, max_tokens=2)).json()
        engine: FakeEngine = server.model.engine  # type: ignore[assignment]
    first, second = byte_ids(b"ab")
    assert completion["prompt_logprobs"] == [
        None,
        {str(second): {"logprob": -0.25, "rank": 1, "decoded_token": "b"}},
    ]
    assert len(chat["prompt_logprobs"]) == len(engine.seen[1].prompt_ids)
    assert chat["prompt_logprobs"][0] is None
    assert list(chat["prompt_logprobs"][1]) == [str(engine.seen[1].prompt_ids[1])]
    assert [entry["rank"] for entry in chat["prompt_logprobs"][1].values()] == [1]
    assert engine.seen[0].prompt_ids == [first, second]


async def test_echo_and_prompt_logprobs_each_have_their_own_number_of_alternatives() -> None:
    async with serving(FakeEngine()) as server:
        choice = (await server.complete(prompt="ab", echo=True, logprobs=1, prompt_logprobs=3, max_tokens=1)).json()
    choice = choice["choices"][0]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 1
    assert len(choice["prompt_logprobs"][1]) == 3


async def test_token_ids_are_told_whole_and_streamed() -> None:
    async with serving(FakeEngine()) as server:
        choice, streamed = await whole_and_streamed(server, prompt="ab", return_token_ids=True)
        chat = (await server.chat(return_token_ids=True, seed=0)).json()
        body = chat_body(return_token_ids=True, seed=0, stream=True)
        parts: list[Any] = chunks(await server.events("/v1/chat/completions", body))
        plain = (await server.chat(seed=0)).json()
        engine: FakeEngine = server.model.engine  # type: ignore[assignment]
    assert choice["prompt_token_ids"] == streamed["prompt_token_ids"] == byte_ids(b"ab")
    assert choice["token_ids"] == streamed["token_ids"] == [*byte_ids(b"ab"), EOS_ID]
    assert chat["prompt_token_ids"] == parts[0]["prompt_token_ids"] == engine.seen[2].prompt_ids
    assert not any("prompt_token_ids" in part for part in parts[1:])
    told = [token for part in parts for choice in part["choices"] for token in choice.get("token_ids", [])]
    assert told == chat["choices"][0]["token_ids"] == [*engine.echo(engine.seen[2]), EOS_ID]
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


async def test_tokens_behind_a_stop_string_are_not_told() -> None:
    engine = FakeEngine()
    engine.say("one two three")
    engine.cuts = [100]
    async with serving(engine) as server:
        choice, streamed = await whole_and_streamed(server, return_token_ids=True, stop="tw", logprobs=0)
    assert choice["text"] == streamed["text"] == "one "
    assert choice["token_ids"] == streamed["token_ids"] == byte_ids(b"one tw")
    assert choice["stop_reason"] == streamed["stop_reason"] == "tw"


async def test_a_stop_reason_is_what_the_client_named() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        engine.say("one")
        by_itself = (await server.chat()).json()["choices"][0]
        by_token = (await server.chat(stop_token_ids=[EOS_ID])).json()["choices"][0]
        parts: list[Any] = chunks(await server.events("/v1/chat/completions", chat_body(stop=["e"], stream=True)))
    assert (by_itself["finish_reason"], by_itself["stop_reason"]) == ("stop", None)
    assert (by_token["finish_reason"], by_token["stop_reason"]) == ("stop", EOS_ID)
    assert parts[-1]["choices"][0]["stop_reason"] == "e"
    assert not any("stop_reason" in part["choices"][0] for part in parts[:-1])


async def test_tokens_can_be_named_by_their_ids() -> None:
    async with serving(FakeEngine()) as server:
        completion = (await server.complete(prompt="ab", logprobs=1, return_tokens_as_token_ids=True, seed=0)).json()
        chat = (await server.chat(logprobs=True, return_tokens_as_token_ids=True, seed=0)).json()
    assert completion["choices"][0]["logprobs"]["tokens"][0] == f"token_id:{byte_ids(b'a')[0]}"
    assert chat["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")


async def test_usage_runs_along_when_it_is_asked_for() -> None:
    engine = FakeEngine()
    engine.say("abcdef")
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving(engine) as server:
        parts: list[Any] = chunks(
            await server.events("/v1/completions", completion_body(stream=True, stream_options=options, max_tokens=4))
        )
        alone: list[Any] = chunks(
            await server.events(
                "/v1/completions", completion_body(stream=True, stream_options={"continuous_usage_stats": True})
            )
        )
    assert [part["usage"]["completion_tokens"] for part in parts] == [1, 2, 3, 4, 4, 4]
    assert len({part["usage"]["prompt_tokens"] for part in parts}) == 1
    assert parts[-1]["choices"] == []
    assert not any("usage" in part for part in alone), "it goes with include_usage, as elsewhere"


async def test_usage_runs_along_with_the_role_of_each_choice_too() -> None:
    engine = FakeEngine()
    engine.say("ab")
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving(engine) as server:
        body = chat_body(stream=True, stream_options=options, n=2)
        parts: list[Any] = chunks(await server.events("/v1/chat/completions", body))
    assert sum("role" in choice["delta"] for part in parts for choice in part["choices"]) == 2
    assert [part["usage"] is None for part in parts] == [False] * len(parts)


async def test_what_edits_logits_reaches_the_engine() -> None:
    engine = FakeEngine(generation_defaults={"repetition_penalty": 1.1})
    async with serving(engine) as server:
        response = await server.complete(
            prompt="a", presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.3, seed=1, temperature=0,
            logit_bias={"5": 1, "7": -2.5}, bad_words=["ab", " the"], allowed_token_ids=[4, 5, 6],
        )  # fmt: skip
        await server.complete()
    assert response.status_code == 200, response.text
    a, b = byte_ids(b"ab")
    (space,), encode = byte_ids(b" "), engine.codec.encode
    assert engine.seen[0].sampling == SamplingParams(
        temperature=0, seed=1, max_tokens=16, presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.3,
        logit_bias={5: 1.0, 7: -2.5}, allowed_token_ids=(4, 5, 6),
        bad_words=(
            (a, b), (space, a, b),
            tuple(encode("the", parse_special=True)), tuple(encode(" the", parse_special=True)),
        ),
    )  # fmt: skip
    assert engine.seen[1].sampling.repetition_penalty == 1.1, "the model's own"


async def test_a_templates_variables_come_from_the_request() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        await server.chat(chat_template_kwargs={"add_greeting": True})
        refused = await server.chat(chat_template_kwargs={"add_generation_prompt": True})
    assert engine.seen
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template_kwargs"
