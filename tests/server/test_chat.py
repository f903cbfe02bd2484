"""POST /v1/chat/completions: shapes, parameters and what reaches the engine."""

from __future__ import annotations

import msgspec
import pytest

from engine.protocol import SamplingParams
from kvstore.keys import PUBLIC_SCOPE
from server.config import ServeConfig
from tests.support.api_server import ApiServer, chat_body, chunks, serving
from tests.support.fake_engine import MAX_MODEL_LEN, FakeEngine
from tests.support.tiny_text import byte_ids


async def test_an_answer_has_the_shape_of_the_api() -> None:
    engine = FakeEngine()
    engine.say("Hello!")
    async with serving(engine) as server:
        response = await server.chat()
    answer = response.json()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "tiny"
    assert answer["system_fingerprint"].startswith("fp_")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt_tokens = len(engine.seen[0].prompt_ids)
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 7,  # the end token counts
        "total_tokens": prompt_tokens + 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_messages_reach_the_engine_through_the_template() -> None:
    engine = FakeEngine()
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": [],
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "3", "name": None},
    ]
    async with serving(engine) as server:
        response = await server.chat(messages=messages)
    assert response.status_code == 200, response.text
    assert engine.codec.decode(engine.seen[0].prompt_ids, show_special=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("one, two,", "one, two,"),
        ("i", "i"),  # a text that is in "<|im_end|>" as well
        ("m_end|>\n", "m_end|>\n"),
        ("a space is kept ", "a space is kept "),
        ([{"type": "text", "text": "one,"}, {"type": "text", "text": " two"}], "one,\n two"),
    ],
)
async def test_the_final_message_can_be_continued(content: object, shown: str) -> None:
    engine = FakeEngine()
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": content}]
    async with serving(engine) as server:
        response = await server.chat(messages=messages, continue_final_message=True)
    assert response.status_code == 200, response.text
    prompt = engine.codec.decode(engine.seen[0].prompt_ids, show_special=True)
    assert prompt.endswith(f"<|im_end|>\n<|im_start|>assistant\n{shown}")


@pytest.mark.parametrize("content", ["", " ", [], None])
async def test_a_final_message_without_text_cannot_be_continued(content: object) -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": content}]
    async with serving(FakeEngine()) as server:
        response = await server.chat(messages=messages, continue_final_message=True)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "continue_final_message"


async def test_every_sampling_parameter_reaches_the_engine() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        response = await server.chat(
            temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=11, max_tokens=100, max_completion_tokens=20.0,
            min_tokens=2, stop_token_ids=[5, 6], ignore_eos=True, logprobs=True, top_logprobs=3, priority=-4,
        )  # fmt: skip
    assert response.status_code == 200, response.text
    request = engine.seen[0]
    assert request.priority == -4
    assert request.sampling == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=11, max_tokens=20, min_tokens=2, stop_token_ids=(5, 6),
        ignore_eos=True, logprobs=3,
    )  # fmt: skip


async def test_the_models_own_defaults_apply_where_the_request_is_silent() -> None:
    engine = FakeEngine(generation_defaults={"temperature": 0.2, "top_k": 40, "unknown_thing": 3})
    async with serving(engine) as server:
        await server.chat()
        await server.chat(temperature=1, top_k=-1)
        await server.chat(temperature=None)
    assert [(request.sampling.temperature, request.sampling.top_k) for request in engine.seen] == [
        (0.2, 40), (1.0, 0), (0.2, 40),
    ]  # fmt: skip


async def test_null_is_the_same_as_absent_for_every_field() -> None:
    engine = FakeEngine()
    fields = """
        temperature top_p top_k min_p seed n max_tokens max_completion_tokens min_tokens stop stop_token_ids
        include_stop_str_in_output ignore_eos skip_special_tokens stream stream_options priority cache_salt logprobs
        top_logprobs add_generation_prompt continue_final_message response_format tools tool_choice logit_bias
        presence_penalty user metadata
    """.split()  # noqa: SIM905
    async with serving(engine) as server:
        response = await server.chat(**dict.fromkeys(fields))
        plain = await server.chat()
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["finish_reason"] == plain.json()["choices"][0]["finish_reason"]
    with_nulls, without = (msgspec.structs.replace(one.sampling, seed=0) for one in engine.seen)
    assert with_nulls == without


async def test_choices_have_their_own_seeds_also_at_temperature_zero() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        response = await server.chat(n=3, seed=0, temperature=0)
        drawn = await server.chat(n=2)
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
    first, second = engine.seen[:3], engine.seen[3:]
    assert sorted(request.sampling.seed or 0 for request in first) == [0, 1, 2]
    assert len({request.group_id for request in first}) == 1
    assert len({request.request_id for request in first}) == 3
    seeds = sorted(request.sampling.seed or 0 for request in second)
    assert seeds[1] == seeds[0] + 1
    assert drawn.json()["usage"]["prompt_tokens"] == len(second[0].prompt_ids)


async def test_the_largest_seed_has_a_successor() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        assert (await server.chat(n=2, seed=2**63 - 1)).status_code == 200
    assert sorted(request.sampling.seed or 0 for request in engine.seen) == [-(2**63), 2**63 - 1]


async def test_logprobs_name_every_token_and_its_bytes() -> None:
    engine = FakeEngine()
    engine.reply = lambda request: byte_ids("é!".encode())
    async with serving(engine) as server:
        response = await server.chat(logprobs=True, top_logprobs=4)
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert response.json()["usage"]["completion_tokens"] == len(content) == 4
    assert [entry["bytes"] for entry in content[:3]] == [[0xC3], [0xA9], [ord("!")]]
    assert content[2]["token"] == "!"
    assert content[3]["token"] == "<|im_end|>"
    assert [len(entry["top_logprobs"]) for entry in content] == [4] * 4
    assert content[0]["top_logprobs"][3]["logprob"] == -9999.0  # JSON has no infinity


async def test_logprobs_without_alternatives_are_allowed() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        response = await server.chat(logprobs=True, top_logprobs=0)
    assert response.status_code == 200
    assert all(entry["top_logprobs"] == [] for entry in response.json()["choices"][0]["logprobs"]["content"])
    assert engine.seen[0].sampling.logprobs == 0


async def test_cached_tokens_are_told_alike_streamed_and_not() -> None:
    engine = FakeEngine()
    body = chat_body(messages=[{"role": "user", "content": "word " * 60}], stream_options={"include_usage": True})
    async with serving(engine) as server:
        whole = await server.chat(messages=body["messages"])
        again = await server.chat(messages=body["messages"])
        events = await server.events("/v1/chat/completions", body | {"stream": True})
    assert whole.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 64
    assert chunks(events)[-1]["usage"] == again.json()["usage"]


async def test_choices_of_one_prompt_do_not_count_each_others_work_as_cached() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        response = await server.chat(messages=[{"role": "user", "content": "word " * 60}], n=2)
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_cache_salt_parts_caches() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        for salt in (None, "a", "a", "b"):
            await server.chat(cache_salt=salt)
    scopes = [request.cache_scope for request in engine.seen]
    assert scopes[0] == PUBLIC_SCOPE
    assert scopes[1] == scopes[2]
    assert len(set(scopes)) == 3


async def test_a_stop_string_ends_the_choice_in_the_engine() -> None:
    engine = FakeEngine()
    engine.say("one two three four")
    async with serving(engine) as server:
        response = await server.chat(stop="three", logprobs=True)
    choice = response.json()["choices"][0]
    assert choice["message"]["content"] == "one two "
    assert choice["finish_reason"] == "stop"
    kept = len("one two three")
    assert response.json()["usage"]["completion_tokens"] == kept
    assert len(choice["logprobs"]["content"]) == kept
    assert list(engine.finished.values()) == [kept]
    assert engine.aborted == []


async def test_overshoot_behind_a_stop_string_is_not_counted() -> None:
    engine = FakeEngine()
    engine.say("one two three four")
    engine.cuts = [100]
    async with serving(engine) as server:
        response = await server.chat(stop=["never", "wo"], include_stop_str_in_output=True, logprobs=True)
    choice = response.json()["choices"][0]
    assert choice["message"]["content"] == "one two"
    assert response.json()["usage"]["completion_tokens"] == len(choice["logprobs"]["content"]) == len("one two")


async def test_special_tokens_are_shown_on_demand_only() -> None:
    engine = FakeEngine()
    engine.reply = lambda request: [*byte_ids(b"a"), 1, *byte_ids(b"b")]
    async with serving(engine) as server:
        hidden = await server.chat()
        shown = await server.chat(skip_special_tokens=False)
    assert hidden.json()["choices"][0]["message"]["content"] == "ab"
    assert shown.json()["choices"][0]["message"]["content"] == "a<|im_start|>b"


async def test_unknown_fields_are_ignored_and_named() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        response = await server.chat(
            shiny_new=1,
            stream=True,
            stream_options={"odd": 1},
            user="me",
            metadata={"a": "b"},
            store=True,
            **{"é\n": 2},
        )
        counted = (await server.client.get("/metrics")).text
        silent = await server.chat(user="me", metadata={"a": "b"}, store=True, service_tier="auto")
    assert response.headers["x-ignored-params"] == "shiny_new, ??, stream_options.odd"
    assert "headrace_ignored_params_total 3.0" in counted
    assert "x-ignored-params" not in silent.headers


async def test_values_without_effect_are_not_refused() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        response = await server.chat(
            response_format={"type": "text"}, tools=[], tool_choice="none", logit_bias={}, presence_penalty=0,
            frequency_penalty=0.0, repetition_penalty=1.0, n=2, best_of=2,
            modalities=["text"], parallel_tool_calls=True,
        )  # fmt: skip
    assert response.status_code == 200, response.text
    assert "x-ignored-params" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_equal_request_ids_of_clients_do_not_meet_in_the_engine(stream: bool) -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        headers = {"x-request-id": "mine"}
        first, second = [
            await server.client.post("/v1/chat/completions", json=chat_body(stream=stream), headers=headers)
            for _ in range(2)
        ]
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "mine"
    assert len({request.request_id for request in engine.seen}) == 2


async def test_a_deadline_follows_from_the_configured_time_out() -> None:
    engine = FakeEngine()
    async with serving(engine, config=ServeConfig(request_timeout_s=60)) as server:
        await server.chat()
    assert engine.seen[0].deadline_unix_s is not None


async def test_a_model_without_a_template_says_what_to_do(server_without_template: ApiServer) -> None:
    response = await server_without_template.chat()
    assert response.status_code == 400
    assert "--chat-template" in response.json()["error"]["message"]
    assert (await server_without_template.complete()).status_code == 200


@pytest.fixture
async def server_without_template():  # noqa: ANN201
    async with serving(FakeEngine(with_template=False)) as server:
        yield server


async def test_without_a_limit_an_answer_may_take_the_rest_of_the_window() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        await server.chat()
        await server.chat(max_completion_tokens=MAX_MODEL_LEN)
    first, second = engine.seen
    assert first.sampling.max_tokens == second.sampling.max_tokens == MAX_MODEL_LEN - len(first.prompt_ids)
