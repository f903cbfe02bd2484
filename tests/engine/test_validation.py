"""The door: every value in range or an error that names the parameter."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import PromptTooLongError, RequestError, UnsupportedError
from engine.protocol import EngineInfo, GenerateRequest, Grammar, KVTicket
from engine.validation import MAX_STOP_TOKEN_IDS, validate
from tests.support.core_world import make_info, make_request

INFO = make_info(max_model_len=100, vocab_size=50)

BAD = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 0.0),
    ("top_p", -0.5),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", "x"),
    ("max_tokens", -1),
    ("presence_penalty", 2.1),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", True),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("logit_bias", {50: 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {2**70: 1.0}),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ("bad_words", ((),)),
    ("bad_words", ((1,) * 65,)),
    ("bad_words", ((50,),)),
    ("bad_words", ((1, 2),) * 257),
    ("allowed_token_ids", ()),
    ("allowed_token_ids", (50,)),
    ("max_tokens", 101),
    ("min_tokens", -1),
    ("min_tokens", 101),
    ("logprobs", -1),
    ("logprobs", 21),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("stop_token_ids", (50,)),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (1,) * (MAX_STOP_TOKEN_IDS + 1)),
    ("request_id", ""),
    ("request_id", "x" * 257),
    ("group_id", "x" * 257),
    ("attempt", -1),
    ("priority", 2**31),
    ("deadline_unix_s", math.nan),
    ("cache_scope", b"short"),
    ("traceparent", "x" * 513),
    ("resume_ids", [50]),
    ("resume_ids", [-1]),
]


@pytest.mark.parametrize(("param", "value"), BAD, ids=[f"{param}={str(value)[:12]}" for param, value in BAD])
def test_a_value_out_of_range_is_refused_by_name(param: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        validate(make_request(**({"request_id": "r"} | {param: value})), INFO)  # type: ignore[arg-type]
    assert caught.value.param == param
    assert param in str(caught.value)


GOOD = [
    ("temperature", 0.0),
    ("temperature", 2.0),
    ("temperature", 1),
    ("top_p", 1.0),
    ("top_p", 1e-9),
    ("min_p", 0.0),
    ("min_p", 1.0),
    ("top_k", 7),
    ("seed", 2**63 - 1),
    ("seed", -(2**63)),
    ("logprobs", 0),
    ("logprobs", 20),
    ("stop_token_ids", (0, 49)),
    ("max_tokens", 1),
    ("priority", -5),
    ("deadline_unix_s", 0.0),
]


@pytest.mark.parametrize(("param", "value"), GOOD, ids=[f"{param}={value}" for param, value in GOOD])
def test_a_value_in_range_is_kept(param: str, value: object) -> None:
    checked = validate(make_request(**{param: value}), INFO)  # type: ignore[arg-type]
    owner = checked.sampling if hasattr(checked.sampling, param) else checked
    assert getattr(owner, param) == value


@pytest.mark.parametrize(
    "prompt", [[50], [-1], [1, 2**40], [2**70], [1.5], ["a"], [None]], ids=lambda prompt: str(prompt)[:12]
)
def test_a_prompt_id_outside_the_vocabulary_is_refused(prompt: list[int]) -> None:
    with pytest.raises(RequestError) as caught:
        validate(make_request(prompt=prompt), INFO)
    assert caught.value.param == "prompt"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        validate(make_request(prompt=[]), INFO)
    assert caught.value.param == "prompt"


def test_a_prompt_that_fills_the_window_is_refused_with_both_numbers() -> None:
    with pytest.raises(PromptTooLongError) as caught:
        validate(make_request(prompt=[1] * 100), INFO)
    assert (caught.value.prompt_tokens, caught.value.max_model_len) == (100, 100)
    assert validate(make_request(prompt=[1] * 99), INFO).sampling.max_tokens == 1


def test_the_kv_pool_bounds_the_window_too() -> None:
    info = make_info(max_model_len=100, kv_capacity_tokens=40)
    with pytest.raises(PromptTooLongError):
        validate(make_request(prompt=[1] * 40), info)
    assert validate(make_request(prompt=[1] * 30), info).sampling.max_tokens == 10


def test_tiny_temperatures_are_greedy() -> None:
    assert validate(make_request(temperature=9e-6), INFO).sampling.temperature == 0.0
    assert validate(make_request(temperature=1e-5), INFO).sampling.temperature == 1e-5


@pytest.mark.parametrize(("top_k", "expected"), [(-1, 0), (0, 0), (1, 1), (50, 50), (1000, 50)])
def test_top_k_is_off_or_within_the_vocabulary(top_k: int, expected: int) -> None:
    assert validate(make_request(top_k=top_k), INFO).sampling.top_k == expected


def test_max_tokens_is_the_rest_of_the_window_unless_given() -> None:
    assert validate(make_request(prompt=[1] * 90), INFO).sampling.max_tokens == 10
    assert validate(make_request(prompt=[1] * 90, max_tokens=4), INFO).sampling.max_tokens == 4


def test_max_tokens_beyond_the_window_is_cut_and_min_tokens_with_it() -> None:
    sampling = validate(make_request(prompt=[1] * 90, max_tokens=50, min_tokens=20), INFO).sampling
    assert (sampling.max_tokens, sampling.min_tokens) == (10, 10)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        validate(make_request(max_tokens=4, min_tokens=5), INFO)
    assert caught.value.param == "min_tokens"


def test_resumed_tokens_must_leave_one_to_generate() -> None:
    assert validate(make_request(max_tokens=4, resume_ids=[1, 2, 3]), INFO).resume_ids == [1, 2, 3]
    with pytest.raises(RequestError) as caught:
        validate(make_request(max_tokens=4, resume_ids=[1, 2, 3, 4]), INFO)
    assert caught.value.param == "resume_ids"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("kv_ticket", KVTicket(address="a", request_id="r", generation=1, tokens=1, expires_unix_s=0), "kv_ticket"),
        ("mode", "prefill_only", "mode"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(field: str, value: object, param: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        validate(make_request(**{field: value}), INFO)  # type: ignore[arg-type]
    assert caught.value.param == param


@pytest.mark.parametrize("source", ["a" * 200_000, "\ud800"])
def test_a_grammar_is_bounded_and_made_of_characters(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        validate(make_request(grammar=Grammar("regex", source)), INFO)
    assert caught.value.param == "structured_outputs"


def test_a_valid_request_without_open_limits_is_returned_as_it_is() -> None:
    request = make_request(max_tokens=5)
    assert validate(request, INFO) is request


@settings(max_examples=200, deadline=None)
@given(
    prompt_len=st.integers(1, 60),
    resumed=st.integers(0, 10),
    max_tokens=st.none() | st.integers(1, 60),
    min_tokens=st.integers(0, 70),
    top_k=st.integers(-1, 100),
    temperature=st.floats(0, 2),
    info=st.builds(
        make_info, max_model_len=st.integers(2, 60), kv_capacity_tokens=st.integers(2, 60), vocab_size=st.just(50)
    ),
)
def test_a_second_pass_changes_nothing(
    prompt_len: int,
    resumed: int,
    max_tokens: int | None,
    min_tokens: int,
    top_k: int,
    temperature: float,
    info: EngineInfo,
) -> None:
    request: GenerateRequest = make_request(
        prompt=[1] * prompt_len,
        resume_ids=[1] * resumed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        top_k=top_k,
        temperature=temperature,
    )
    try:
        once = validate(request, info)
    except RequestError:
        return
    assert validate(once, info) == once
    sampling = once.sampling
    assert sampling.max_tokens is not None
    assert 0 <= sampling.min_tokens <= sampling.max_tokens
    assert prompt_len + sampling.max_tokens <= min(info.max_model_len, info.kv_capacity_tokens)
    assert resumed < sampling.max_tokens
