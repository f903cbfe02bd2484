"""POST /v1/completions: the four forms of a prompt, indexes, usage and the shape of logprobs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.service import PREPARING
from server.text_service import TextService
from tests.support.api_server import chunks, completion_body, serving
from tests.support.fake_engine import FakeEngine
from tests.support.tiny_text import byte_ids


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", [b"Hi"]),
        (["Hi", "you"], [b"Hi", b"you"]),
        (byte_ids(b"Hi"), [b"Hi"]),
        ([float(token) for token in byte_ids(b"Hi")], [b"Hi"]),
        ([byte_ids(b"Hi"), byte_ids(b"yo")], [b"Hi", b"yo"]),
    ],
)
async def test_each_form_of_prompt_is_understood(prompt: object, prompts: list[bytes]) -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        response = await server.complete(prompt=prompt)
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == len(prompts)
    seen = sorted(engine.seen, key=lambda request: request.request_id)
    assert [request.prompt_ids for request in seen] == [byte_ids(prompt) for prompt in prompts]


async def test_an_answer_has_the_shape_of_the_api() -> None:
    engine = FakeEngine()
    engine.say("x" * 40)
    async with serving(engine) as server:
        answer = (await server.complete()).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": "x" * 16, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"]["completion_tokens"] == 16  # the route's default limit


async def test_indexes_run_over_prompts_and_then_choices() -> None:
    engine = FakeEngine()
    body = completion_body(prompt=["abcd", "efgh", "ijkl"], n=2, seed=0)
    async with serving(engine) as server:
        answer = (await server.post("/v1/completions", body)).json()
        events = chunks(await server.events("/v1/completions", body | {"stream": True}))
    texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
    assert texts == {0: "abcd", 1: "bcda", 2: "efgh", 3: "fghe", 4: "ijkl", 5: "jkli"}
    assert answer["usage"]["prompt_tokens"] == 12
    assert answer["usage"]["completion_tokens"] == 6 * 5
    streamed = dict.fromkeys(range(6), "")
    finishes: list[int] = []
    for event in events:
        (choice,) = event["choices"]
        streamed[choice["index"]] += choice["text"]
        finishes += [choice["index"]] if choice["finish_reason"] else []
    assert streamed == texts
    assert sorted(finishes) == list(range(6))


async def test_equal_prompts_without_a_seed_do_not_share_one() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        await server.complete(prompt=["same", "same"])
        await server.complete(prompt=["same", "same"], seed=3)
    assert engine.seen[0].sampling.seed != engine.seen[1].sampling.seed
    assert engine.seen[2].sampling.seed == engine.seen[3].sampling.seed == 3


async def test_logprobs_have_four_lists_of_one_length_and_offsets_into_the_text() -> None:
    engine = FakeEngine()
    engine.say("añb c")
    body = completion_body(logprobs=2)
    async with serving(engine) as server:
        answer = (await server.post("/v1/completions", body)).json()
        events = chunks(await server.events("/v1/completions", body | {"stream": True}))
    logprobs = answer["choices"][0]["logprobs"]
    assert {len(values) for values in logprobs.values()} == {answer["usage"]["completion_tokens"]}
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4, 5]
    assert logprobs["token_logprobs"] == [-0.25] * 7
    assert logprobs["tokens"][0] == "a"
    assert logprobs["top_logprobs"][0] == {"a": -0.25, "b": -1.25}
    parts = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    assert {name: [value for part in parts for value in part[name]] for name in logprobs} == logprobs


async def test_logprobs_of_zero_alternatives_have_no_tops() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        logprobs = (await server.complete(logprobs=0)).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [None] * len(logprobs["tokens"])


async def test_special_tokens_in_a_raw_prompt_are_tokens() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        await server.complete(prompt="<|im_start|>a")
    assert engine.seen[0].prompt_ids == [1, *byte_ids(b"a")]


async def test_a_request_of_many_prompts_is_one_request() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        response = await server.complete(prompt=[f"p{number}" for number in range(600)], max_tokens=1)
    assert response.status_code == 200, response.text
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(600))
    assert response.json()["usage"]["completion_tokens"] == 600


async def test_of_many_requests_at_once_a_few_are_prepared_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = 0, 0
    plain = TextService.prompts_ids

    async def counted(text: TextService, *args: Any, **kwargs: Any) -> list[list[int]]:  # noqa: ANN401
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        try:
            return await plain(text, *args, **kwargs)
        finally:
            inside -= 1

    monkeypatch.setattr(TextService, "prompts_ids", counted)
    async with serving(FakeEngine()) as server:
        responses = await asyncio.gather(*(server.complete() for _ in range(3 * PREPARING)))
    assert {response.status_code for response in responses} == {200}
    assert 1 < most <= PREPARING


async def test_allowed_tokens_are_bounded_over_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.openai.sampling.MAX_ALLOWED_VALUES", 60)
    engine = FakeEngine()
    async with serving(engine) as server:
        fits = await server.complete(prompt=["a", "b"], n=3, allowed_token_ids=list(range(10)))
        over = await server.complete(prompt=["a", "b"], n=3, allowed_token_ids=list(range(11)))
    assert fits.status_code == 200, fits.text
    assert over.status_code == 400
    assert over.json()["error"]["param"] == "allowed_token_ids"
    assert len(engine.seen) == 6


@pytest.mark.parametrize("entries_on_loop", [0, 10**9])
async def test_an_answer_is_the_same_whether_it_is_written_on_the_loop_or_off_it(
    monkeypatch: pytest.MonkeyPatch, entries_on_loop: int
) -> None:
    monkeypatch.setattr("server.openai.exchange.ENTRIES_ON_LOOP", entries_on_loop)
    engine = FakeEngine()
    async with serving(engine) as server:
        answer = (await server.complete(n=2, seed=0, logprobs=2, echo=True)).json()
        chat = (await server.chat(n=2, seed=0, logprobs=True, top_logprobs=2)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert "".join(choice["logprobs"]["tokens"][: len(choice["text"])]).startswith("Hi there")
    for choice in chat["choices"]:
        assert "".join(token["token"] for token in choice["logprobs"]["content"]).startswith(
            choice["message"]["content"]
        )
