"""The error table, and a catalogue of requests that broke other servers: each gets its answer, the next one works."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.exceptions import HTTPException

from engine import errors as tree
from server.config import ServeConfig
from server.errors import TABLE, BodyTooLargeError, BodyTooSlowError, ClientGoneError, UnknownModelError, reply_to
from server.service import Service
from tests.support.api_server import ApiServer, chat_body, completion_body, serving
from tests.support.fake_engine import MAX_MODEL_LEN, FakeEngine
from tests.support.tiny_text import EOS_ID, VOCAB_SIZE

BODY_LIMIT = 300_000
RETRY_IN_1_S = ("retry-after", "1")
NO_RETRY = ("x-should-retry", "false")


def every_subclass(base: type[BaseException]) -> list[type[BaseException]]:
    return [base, *(below for child in base.__subclasses__() for below in every_subclass(child))]


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "header"),
    [
        (tree.RequestError("m", param="p"), 400, "invalid_request_error", "invalid_value", None),
        (tree.PromptTooLongError(9, 8), 400, "invalid_request_error", "context_length_exceeded", None),
        (tree.UnsupportedError("m"), 400, "invalid_request_error", "unsupported_parameter", None),
        (UnknownModelError("x", ["y"]), 404, "invalid_request_error", "model_not_found", None),
        (BodyTooLargeError(5), 413, "invalid_request_error", "request_too_large", None),
        (BodyTooSlowError(5), 408, "invalid_request_error", "request_timeout", None),
        (tree.PressureError("m", retry_after_s=0.2), 429, "rate_limit_error", "server_is_overloaded", RETRY_IN_1_S),
        (tree.PressureError("m", retry_after_s=999), 429, "rate_limit_error", "server_is_overloaded",
         ("retry-after", "60")),
        (tree.DrainingError("m"), 503, "service_unavailable_error", "server_is_draining", RETRY_IN_1_S),
        (tree.LoadingError("m", progress=0.5), 503, "service_unavailable_error", "model_is_loading", RETRY_IN_1_S),
        (tree.DeadlineError("m"), 504, "server_error", "deadline_exceeded", NO_RETRY),
        (tree.EngineDiedError("m"), 503, "service_unavailable_error", "engine_died", RETRY_IN_1_S),
        (tree.RequestFailedError("m"), 500, "server_error", "request_failed", NO_RETRY),
        (ClientGoneError("m"), 499, "invalid_request_error", "client_closed_request", NO_RETRY),
        (HTTPException(404), 404, "invalid_request_error", "unknown_url", None),
        (HTTPException(405, headers={"Allow": "GET"}), 405, "invalid_request_error", "method_not_allowed",
         ("allow", "GET")),
        (KeyError("m"), 500, "server_error", "internal_error", NO_RETRY),
    ],
)  # fmt: skip
def test_each_error_has_its_answer(error: Exception, status: int, kind: str, code: str, header: object) -> None:
    reply = reply_to(error)
    body = json.loads(reply.body)["error"]
    assert (reply.status, body["type"], body["code"]) == (status, kind, code)
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]
    assert [(name.decode(), value.decode()) for name, value in reply.headers] == ([header] if header else [])


def test_the_table_knows_the_whole_tree_and_no_rule_hides_another() -> None:
    for error in every_subclass(tree.HeadraceError):
        assert any(issubclass(error, rule.error) for rule in TABLE), error
    for index, rule in enumerate(TABLE):
        assert not any(issubclass(rule.error, earlier.error) for earlier in TABLE[:index]), rule.error


# Each row: a name, the route (C chat, T text completion), the body's fields (or raw bytes), the status, the parameter.
def C(**fields: object) -> tuple[str, dict[str, object]]:
    return "/v1/chat/completions", chat_body(**fields)


def T(**fields: object) -> tuple[str, dict[str, object]]:
    return "/v1/completions", completion_body(**fields)


LONG = "x " * MAX_MODEL_LEN

REPLAY: list[tuple[str, tuple[str, Any], int, str | None]] = [
    # Bodies that are no request.
    ("json broken", ("/v1/chat/completions", b"{:"), 400, None),
    ("json broken inside", ("/v1/completions", b'{"model": "tiny", "prompt": }'), 400, None),
    ("empty body", ("/v1/chat/completions", b""), 400, None),
    ("body is a list", ("/v1/chat/completions", b"[1]"), 400, None),
    ("body is a string", ("/v1/chat/completions", b'"x"'), 400, None),
    ("body is null", ("/v1/chat/completions", b"null"), 400, None),
    ("body is not utf-8", ("/v1/chat/completions", b'{"model": "\xff"}'), 400, None),
    ("NaN literal", ("/v1/completions", b'{"model": "tiny", "prompt": "a", "temperature": NaN}'), 400, None),
    ("infinite number", ("/v1/completions", b'{"model": "tiny", "prompt": "a", "top_p": 1e999}'), 400, "top_p"),
    ("number of 5000 digits", ("/v1/completions", b'{"model": "tiny", "prompt": "a", "n": ' + b"9" * 5000 + b"}"),
     400, None),
    ("deep nesting", ("/v1/chat/completions", b'{"model": "tiny", "messages": ' + b"[" * 100_000), 400, None),
    ("deep nesting closed", ("/v1/completions", b'{"x": ' + b"[" * 9_000 + b"]" * 9_000 + b"}"), 400, None),
    ("lone surrogate", ("/v1/completions", b'{"model": "tiny", "prompt": "\\ud800"}'), 400, None),
    ("body too large", T(prompt="x" * BODY_LIMIT), 413, None),
    ("duplicate key, last wins", ("/v1/completions", b'{"model": "no", "model": "tiny", "prompt": "a"}'), 200, None),
    # Model and messages.
    ("model missing", ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}), 400, "model"),
    ("model unknown", C(model="gpt-4"), 404, "model"),
    ("model a number", C(model=3), 400, "model"),
    ("messages missing", ("/v1/chat/completions", {"model": "tiny"}), 400, "messages"),
    ("messages null", C(messages=None), 400, "messages"),
    ("messages empty", C(messages=[]), 400, "messages"),
    ("messages a string", C(messages="hi"), 400, "messages"),
    ("message a string", C(messages=["hi"]), 400, "messages[0]"),
    ("unknown role", C(messages=[{"role": "wizard", "content": "a"}]), 400, "messages[0].role"),
    ("role missing", C(messages=[{"content": "a"}]), 400, "messages[0].role"),
    ("content null for a user", C(messages=[{"role": "user", "content": None}]), 400, "messages[0]"),
    ("content a number", C(messages=[{"role": "user", "content": 3}]), 400, "messages[0].content"),
    ("image part", C(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), 400,
     "messages[0].content[0].type"),
    ("part without text", C(messages=[{"role": "user", "content": [{"type": "text"}]}]), 400,
     "messages[0].content[0].text"),
    ("text and tool calls", C(messages=[
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "c"}]), 200, None),
    ("empty content and tool calls", C(messages=[
        {"role": "assistant", "content": [], "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "c"}]), 200, None),
    ("tool arguments that are no JSON", C(messages=[{"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]), 400,
     "messages[0].tool_calls[0].function.arguments"),
    ("prompt over the window", C(messages=[{"role": "user", "content": LONG}]), 400, "messages"),
    ("prompt over the window, streamed", C(messages=[{"role": "user", "content": LONG}], stream=True), 400, "messages"),
    ("prompt missing", ("/v1/completions", {"model": "tiny"}), 400, "prompt"),
    ("prompt empty text", T(prompt=""), 400, "prompt"),
    ("prompt empty list", T(prompt=[]), 400, "prompt"),
    ("prompt of an empty list", T(prompt=[[]]), 400, "prompt"),
    ("prompt of mixed kinds", T(prompt=["a", 1]), 400, "prompt"),
    ("prompt a number", T(prompt=5), 400, "prompt"),
    ("prompt a flag", T(prompt=[True]), 400, "prompt"),
    ("prompt token negative", T(prompt=[-1]), 400, "prompt"),
    ("prompt token beyond the vocabulary", T(prompt=[VOCAB_SIZE]), 400, "prompt"),
    ("prompt token of 32 bits", T(prompt=[4294967295]), 400, "prompt"),
    ("prompt token beyond 64 bits", T(prompt=[2**70]), 400, "prompt"),
    ("prompt fractional", T(prompt=[1.5]), 400, "prompt"),
    ("prompts too many", T(prompt=["a"] * 1025), 400, "prompt"),
    ("prompts times n too many", T(prompt=["a"] * 1000, n=2), 400, "n"),
    ("text that no tokens could fit into the window", T(prompt="x" * 200_000), 400, "prompt"),
    ("one message that no tokens could fit", C(messages=[{"role": "user", "content": "x" * 200_000}]), 400, "messages"),
    ("one prompt of many over the window", T(prompt=["a", LONG, "b"]), 400, "prompt"),
    ("text over the window", T(prompt=LONG), 400, "prompt"),
    ("text over the window, streamed", T(prompt=LONG, stream=True), 400, "prompt"),
    # Numbers.
    ("temperature 999999", C(temperature=999999), 400, "temperature"),
    ("temperature negative", C(temperature=-0.1), 400, "temperature"),
    ("temperature a string", C(temperature="0.5"), 400, "temperature"),
    ("temperature a flag", C(temperature=True), 400, "temperature"),
    ("top_p zero", C(top_p=0), 400, "top_p"),
    ("top_p negative", C(top_p=-1), 400, "top_p"),
    ("top_k beyond the vocabulary is clamped", T(top_k=9999999), 200, None),
    ("top_k below off", T(top_k=-2), 400, "top_k"),
    ("min_p over one", T(min_p=1.1), 400, "min_p"),
    ("seed 2**64", T(seed=2**64), 400, "seed"),
    ("seed 2**63", C(seed=2**63), 400, "seed"),
    ("seed below", C(seed=-(2**63) - 1), 400, "seed"),
    ("seed 10**20", C(seed=10**20), 400, "seed"),
    ("seed a string", C(seed="100"), 400, "seed"),
    ("seed zero", C(seed=0), 200, None),
    ("n five millions", C(n=5000000), 400, "n"),
    ("n zero", C(n=0), 400, "n"),
    ("n a string", C(n="2"), 400, "n"),
    ("n whole float", C(n=2.0), 200, None),
    ("n fractional", C(n=1.5), 400, "n"),
    ("n a flag", C(n=True), 400, "n"),
    ("max_tokens zero", C(max_tokens=0), 400, "max_tokens"),
    ("max_tokens negative", C(max_tokens=-1), 400, "max_tokens"),
    ("max_tokens over the window", C(max_tokens=MAX_MODEL_LEN + 1), 400, "max_tokens"),
    ("max_completion_tokens over the window", C(max_completion_tokens=MAX_MODEL_LEN + 1), 400, "max_completion_tokens"),
    ("prompt and max_tokens over the window are cut", C(max_tokens=MAX_MODEL_LEN), 200, None),
    ("min_tokens over max_tokens", C(min_tokens=5, max_tokens=4), 400, "min_tokens"),
    ("priority a string", C(priority="high"), 400, "priority"),
    # Stops.
    ("stop empty", C(stop=""), 400, "stop"),
    ("stop with an empty string", C(stop=["a", ""]), 400, "stop"),
    ("stop seventeen", C(stop=["a"] * 17), 400, "stop"),
    ("stop a number", C(stop=3), 400, "stop"),
    ("stop a list of numbers", C(stop=[3]), 400, "stop"),
    ("stop as a list", T(stop=["zzz"]), 200, None),
    ("stop_token_ids beyond the vocabulary", C(stop_token_ids=[VOCAB_SIZE], max_tokens=300), 400, "stop_token_ids"),
    ("stop_token_ids a string", C(stop_token_ids=["1"]), 400, "stop_token_ids[0]"),
    # Logprobs.
    ("top_logprobs a string", C(logprobs=True, top_logprobs="2"), 400, "top_logprobs"),
    ("top_logprobs too many", C(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    ("top_logprobs without logprobs", C(top_logprobs=2), 400, "top_logprobs"),
    ("top_logprobs zero", C(logprobs=True, top_logprobs=0), 200, None),
    ("logprobs a number in chat", C(logprobs=1), 400, "logprobs"),
    ("logprobs a flag in completions", T(logprobs=True), 400, "logprobs"),
    ("infinite logprobs", T(logprobs=5, temperature=0.01, top_p=0.3), 200, None),
    ("prompt_logprobs", T(prompt_logprobs="2"), 400, "prompt_logprobs"),
    # Flags and options.
    ("stream yes", C(stream="yes"), 400, "stream"),
    ("stream one", C(stream=1), 400, "stream"),
    ("stream_options without stream", T(stream_options={"include_usage": True}), 400, "stream_options"),
    ("stream_options without stream in chat", C(stream_options={}), 400, "stream_options"),
    ("include_usage a string", C(stream=True, stream_options={"include_usage": "yes"}), 400,
     "stream_options.include_usage"),
    ("ignore_eos a number", C(ignore_eos=0), 400, "ignore_eos"),
    ("cache_salt empty", C(cache_salt=""), 400, "cache_salt"),
    ("both ways to begin", C(add_generation_prompt=True, continue_final_message=True), 400, "continue_final_message"),
    # What changes logits.
    ("logit_bias beyond the vocabulary", C(logit_bias={"191222": -100}), 400, "logit_bias"),
    ("logit_bias at the vocabulary's end", C(logit_bias={str(VOCAB_SIZE): 1}), 400, "logit_bias"),
    ("logit_bias negative id", C(logit_bias={"-1": 1}), 400, "logit_bias"),
    ("logit_bias by a word", C(logit_bias={"the": 1}), 400, "logit_bias"),
    ("logit_bias by a number in other digits", C(logit_bias={"²": 1}), 400, "logit_bias"),
    ("logit_bias too strong", C(logit_bias={"5": -101}), 400, "logit_bias"),
    ("logit_bias a string", C(logit_bias={"5": "1"}), 400, "logit_bias"),
    ("logit_bias a flag", C(logit_bias={"5": True}), 400, "logit_bias"),
    ("logit_bias infinite", ("/v1/completions", b'{"model": "tiny", "prompt": "a", "logit_bias": {"5": 1e999}}'),
     400, "logit_bias"),
    ("logit_bias a list", C(logit_bias=[[5, 1]]), 400, "logit_bias"),
    ("logit_bias 1025 entries", C(logit_bias={str(token): 0 for token in range(1025)}), 400, "logit_bias"),
    ("logit_bias", C(logit_bias={"5": -100, "6": 1.5}), 200, None),
    ("repetition_penalty zero", T(repetition_penalty=0), 400, "repetition_penalty"),
    ("repetition_penalty negative", C(repetition_penalty=-1), 400, "repetition_penalty"),
    ("repetition_penalty", C(repetition_penalty=1.2), 200, None),
    ("repeat_penalty of another server", C(repeat_penalty=0), 400, "repeat_penalty"),
    ("presence_penalty too large", C(presence_penalty=2.5), 400, "presence_penalty"),
    ("presence_penalty a string", C(presence_penalty="1"), 400, "presence_penalty"),
    ("presence_penalty", C(presence_penalty=0.5), 200, None),
    ("frequency_penalty too small", C(frequency_penalty=-2.01), 400, "frequency_penalty"),
    ("frequency_penalty", C(frequency_penalty=-1), 200, None),
    ("bad_words", C(bad_words=["humans", "properly"]), 200, None),
    ("bad_words a string", C(bad_words="humans"), 400, "bad_words"),
    ("bad_words an empty one", C(bad_words=["a", ""]), 400, "bad_words"),
    ("bad_words a space", C(bad_words=[" "]), 400, "bad_words"),
    ("bad_words numbers", C(bad_words=[5]), 400, "bad_words"),
    ("bad_words 129", C(bad_words=["a"] * 129), 400, "bad_words"),
    ("bad_words a long one", C(bad_words=["a" * 257]), 400, "bad_words"),
    ("bad_words a word of many tokens", C(bad_words=["xyz" * 50]), 400, "bad_words"),
    ("bad_words a lone surrogate",
     ("/v1/completions", b'{"model": "tiny", "prompt": "a", "bad_words": ["\\ud800"]}'), 400, None),
    ("allowed_token_ids", C(allowed_token_ids=[5, 6, EOS_ID]), 200, None),
    ("allowed_token_ids empty", C(allowed_token_ids=[]), 400, "allowed_token_ids"),
    ("allowed_token_ids beyond the vocabulary", C(allowed_token_ids=[VOCAB_SIZE]), 400, "allowed_token_ids"),
    ("allowed_token_ids negative", C(allowed_token_ids=[-1]), 400, "allowed_token_ids"),
    ("allowed_token_ids a flag", C(allowed_token_ids=[True]), 400, "allowed_token_ids"),
    ("allowed_token_ids all banned", C(allowed_token_ids=[EOS_ID], min_tokens=1), 400, "allowed_token_ids"),
    # The prompt's own tokens.
    ("echo", T(echo=True, logprobs=1, max_tokens=1), 200, None),
    ("echo and nothing else", T(echo=True, logprobs=1, max_tokens=0), 200, None),
    ("echo of text alone", T(echo=True, max_tokens=0), 200, None),
    ("echo a number", T(echo=1), 400, "echo"),
    ("max_tokens zero in completions", T(max_tokens=0), 200, None),
    ("max_tokens zero, min_tokens one", T(max_tokens=0, min_tokens=1), 400, "min_tokens"),
    ("max_tokens negative in completions", T(max_tokens=-1), 400, "max_tokens"),
    ("echo of an empty text", T(prompt="", echo=True), 400, "prompt"),
    ("echo of empty lists", T(prompt=[[]], echo=True), 400, "prompt"),
    ("echo over the window", T(prompt=LONG, echo=True), 400, "prompt"),
    ("echo of too much at once", T(prompt=[[5] * 505] * 100, n=10, echo=True), 400, "prompt"),
    ("echo of a token beyond the vocabulary", T(prompt=[VOCAB_SIZE], echo=True), 400, "prompt"),
    ("prompt_logprobs a string in chat", C(prompt_logprobs="2"), 400, "prompt_logprobs"),
    ("prompt_logprobs too many", T(prompt_logprobs=21), 400, "prompt_logprobs"),
    ("prompt_logprobs streamed", T(prompt_logprobs=1, stream=True), 400, "prompt_logprobs"),
    ("prompt_logprobs", C(prompt_logprobs=2), 200, None),
    ("too many prompt logprobs at once", T(prompt=[[5] * 400] * 100, echo=True, logprobs=20), 400, "prompt"),
    ("logprobs too many in completions", T(logprobs=21), 400, "logprobs"),
    ("logprobs twenty in completions", T(logprobs=20), 200, None),
    ("return_token_ids a number", C(return_token_ids=1), 400, "return_token_ids"),
    ("return_tokens_as_token_ids", T(return_tokens_as_token_ids=True, logprobs=1), 200, None),
    ("chat_template_kwargs a list", C(chat_template_kwargs=[]), 400, "chat_template_kwargs"),
    ("chat_template_kwargs that are taken", C(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs"),
    ("chat_template_kwargs", C(chat_template_kwargs={"enable_thinking": False}), 200, None),
    ("continuous usage a string", C(stream=True, stream_options={"continuous_usage_stats": 1}), 400,
     "stream_options.continuous_usage_stats"),
    # What would change the output and is not there.
    ("repetition of other kinds", C(no_repeat_ngram_size=2), 400, "no_repeat_ngram_size"),
    ("mirostat", C(mirostat=2), 400, "mirostat"),
    ("reasoning_effort", C(reasoning_effort="high"), 400, "reasoning_effort"),
    ("previous_response_id", C(previous_response_id="resp_1"), 400, "previous_response_id"),
    ("input_ids", C(input_ids=[1]), 400, "input_ids"),
    ("beam search", T(use_beam_search=True), 400, "use_beam_search"),
    ("logprob_token_ids", C(logprob_token_ids=[1]), 400, "logprob_token_ids"),
    ("prompt_embeds", T(prompt_embeds="x"), 400, "prompt_embeds"),
    ("truncation on the right", T(truncation_side="right"), 400, "truncation_side"),
    ("stop_regex", C(stop_regex="a+"), 400, "stop_regex"),
    ("kv_transfer_params", C(kv_transfer_params={}), 400, "kv_transfer_params"),
    ("regex that killed one", T(guided_regex="^(|.*)$"), 200, None),
    ("recursive schema", C(response_format={"type": "json_schema", "json_schema": {
        "name": "a", "schema": {"$ref": "#"}}}), 400, "response_format"),
    ("json_schema of another server", C(json_schema={"pattern": "("}), 400, "json_schema"),
    ("structural tags", C(response_format={"type": "structural_tag"}), 400, "response_format"),
    ("structured_outputs json_object false", C(structured_outputs={"json_object": False}), 400, "structured_outputs"),
    ("integers beyond 64 bits", C(guided_json={"type": "integer", "maximum": 10**30}), 200, None),
    ("numbers beyond all", C(guided_json='{"type": "integer", "maximum": 1e400}'), 400, "guided_json"),
    ("json empty", C(structured_outputs={"json": ""}), 400, "structured_outputs"),
    ("json a number", C(structured_outputs={"json": 3}), 400, "structured_outputs"),
    ("json that is none", C(structured_outputs={"json": "{"}), 400, "structured_outputs"),
    ("schema false", C(structured_outputs={"json": False}), 400, "structured_outputs"),
    ("schema true", C(structured_outputs={"json": True}), 200, None),
    ("schema true as text", C(guided_json=" true"), 200, None),
    ("guided_json of a wrong type", C(guided_json=[1]), 400, "guided_json"),
    ("keywords that are not there", C(guided_json={"type": "array", "uniqueItems": True}), 400, "guided_json"),
    ("references to nothing", C(guided_json={"$ref": "#/$defs/a"}), 400, "guided_json"),
    ("references to elsewhere", C(guided_json={"$ref": "http://localhost/a.json"}), 400, "guided_json"),
    ("bounds that exclude each other", C(guided_json={"type": "integer", "minimum": 5, "maximum": 3}), 400,
     "guided_json"),
    ("enum of nothing", C(guided_json={"enum": []}), 400, "guided_json"),
    ("look-ahead", C(guided_json={"type": "string", "pattern": "(?=a)b"}), 400, "guided_json"),
    ("nesting without end", C(guided_json='{"items":' * 5000 + "{}" + "}" * 5000), 400, "guided_json"),
    ("a schema too large", C(guided_json={"description": "x" * 140_000}), 400, "guided_json"),
    ("long chain of references", C(guided_json={"$ref": "#/$defs/d0", "$defs": {
        **{f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(2500)}, "d2500": {}}}), 200, None),
    ("an enum of thousands", C(guided_json={"enum": list(range(18_000))}), 200, None),
    ("hundreds of members", C(guided_json={"properties": {f"p{i}": {"type": "null"} for i in range(800)}}), 200, None),
    ("repetitions of repetitions", T(guided_regex="((a{1,100}){1,100}){1,100}"), 200, None),
    ("repetitions that must be there", T(guided_regex="(abc ){100000}"), 400, "guided_regex"),
    ("more of them than there are letters", T(guided_regex="a{1000000000}"), 400, "guided_regex"),
    ("repetitions within each other", T(guided_regex="((a{100}){100}){100}"), 400, "guided_regex"),
    ("repetitions in a pattern", C(guided_json={"type": "string", "pattern": "^x|(ab){30000}$"}), 400, "guided_json"),
    ("repetitions in a pattern, escaped", C(guided_json='{"type": "string", "pattern": "a\\u007b100000}"}'), 400,
     "guided_json"),
    ("repetitions in Lark", C(guided_grammar="start: A\nA: /(ab){100000}/"), 400, "guided_grammar"),
    ("a long text that is no pattern", C(guided_json={"description": "{2}" * 20_000, "type": "null"}), 200, None),
    ("a long string and many repetitions", C(guided_json={"maxLength": 10**9, "type": "string", "minLength": 10**9}),
     200, None),
    ("backtracking without end elsewhere", T(guided_regex="(a+)+b(x+x+)+y"), 200, None),
    ("an automaton of a million states", T(guided_regex="(a|b)*a(a|b){20}"), 200, None),
    ("a pattern as bad", C(guided_json={"type": "string", "pattern": "^((a|b)*a(a|b){20}){3}$"}), 200, None),
    ("remainders of a large prime", C(guided_json={"type": "integer", "multipleOf": 9_999_991}), 400, "guided_json"),
    ("remainders of two primes", C(guided_json={"allOf": [{"multipleOf": 4093}, {"multipleOf": 4091}]}), 400,
     "guided_json"),
    ("remainders in Lark", C(guided_grammar='start: %json {"multiple\\u004ff": 9999991}'), 400, "guided_grammar"),
    ("schemas that double", C(guided_json={"$ref": "#/$defs/d0", "$defs": {
        **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(25)}, "d25": {"type": "string"}}}),
     200, None),
    ("schemas that multiply", C(guided_json={"allOf": [{"anyOf": [
        {"properties": {f"a{i}{j}": {"type": "integer"}}} for j in range(6)]} for i in range(8)]}), 400, "guided_json"),
    ("regex empty", C(guided_regex=""), 400, "guided_regex"),
    ("regex unclosed", C(guided_regex="("), 400, "guided_regex"),
    ("regex of a wrong type", C(guided_regex=["a"]), 400, "guided_regex"),
    ("regex of a lone surrogate",
     ("/v1/completions", b'{"model": "tiny", "prompt": "a", "guided_regex": "\\ud800"}'), 400, None),
    ("choices empty", C(guided_choice=[]), 400, "guided_choice"),
    ("choices of wrong types", C(guided_choice=["a", 1]), 400, "guided_choice[1]"),
    ("an empty choice", C(guided_choice=["a", ""]), 400, "guided_choice"),
    ("too many choices", C(guided_choice=["a"] * 1025), 400, "guided_choice"),
    ("grammar without a start", C(guided_grammar='begin: "a"'), 400, "guided_grammar"),
    ("grammar of nothing", C(guided_grammar="start: start"), 400, "guided_grammar"),
    ("GBNF without a rule", C(structured_outputs={"grammar": "root ::= other"}), 400, "structured_outputs"),
    ("GBNF without an end", C(guided_grammar="root ::= " + "(" * 50_000), 400, "guided_grammar"),
    ("GBNF of many rules", C(grammar="\n".join(f"r{i} ::= r{i + 1}" for i in range(600))), 400, "grammar"),
    ("GBNF", T(grammar='root ::= ("\\u00e9" | "b"){2} # two'), 200, None),
    ("two constraints", C(guided_regex="a", response_format={"type": "json_object"}), 400, "guided_regex"),
    ("two in one", C(structured_outputs={"regex": "a", "json": {}}), 400, "structured_outputs"),
    ("a constraint of another name", C(structured_outputs={"structural_tag": "x"}), 400, "structured_outputs"),
    ("whitespace_pattern", C(structured_outputs={"json": {}, "whitespace_pattern": " "}), 400, "structured_outputs"),
    ("response_format a string", C(response_format="json_object"), 400, "response_format"),
    ("response_format without a type", C(response_format={}), 400, "response_format"),
    ("json_schema missing", C(response_format={"type": "json_schema"}), 400, "response_format"),
    ("schema missing", C(response_format={"type": "json_schema", "json_schema": {"name": "a"}}), 400,
     "response_format"),
    ("schema a string that is none", C(response_format={"type": "json_schema", "json_schema": {"schema": "x"}}), 400,
     "response_format"),
    ("strict a word", C(response_format={"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}), 400,
     "response_format"),
    ("json_schema", C(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}), 200, None),
    ("json_object", C(response_format={"type": "json_object"}), 200, None),
    ("guided_regex", T(guided_regex="^(.*)$"), 200, None),
    ("guided_grammar", T(guided_grammar='start: "a" | "b" start'), 200, None),
    ("structured_outputs empty", T(structured_outputs={}), 200, None),
    ("guided_json", C(guided_json={"type": "not-a-type"}), 400, "guided_json"),
    ("structured_outputs", C(structured_outputs={"regex": "("}), 400, "structured_outputs"),
    ("grammar", C(grammar="root ::= ("), 400, "grammar"),
    ("grammar of a wrong type", C(grammar={"rules": []}), 400, "grammar"),
    ("tools", C(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools"),
    ("tool_choice auto", C(tool_choice="auto"), 400, "tool_choice"),
    ("functions", C(functions=[{"name": "f"}]), 400, "functions"),
    ("suffix", T(suffix="end"), 400, "suffix"),
    ("echo in chat", C(echo=True), 400, "echo"),
    ("best_of", T(best_of=3), 400, "best_of"),
    ("best_of below n", T(best_of=1, n=2), 400, "best_of"),
    ("best_of a string", T(best_of="1"), 400, "best_of"),
    ("audio", C(modalities=["text", "audio"]), 400, "modalities"),
    ("prediction", C(prediction={"type": "content", "content": "a"}), 400, "prediction"),
    ("web search", C(web_search_options={}), 400, "web_search_options"),
    ("chat_template", C(chat_template="{{ 1 }}"), 400, "chat_template"),
    # What is fine.
    ("max_completion_tokens", C(max_completion_tokens=3), 200, None),
    ("hot sampling", T(temperature=1.5, top_k=100), 200, None),
    ("user and metadata", C(user="u", metadata={"k": "v"}, store=False, safety_identifier="s"), 200, None),
]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server():  # noqa: ANN201
    async with serving(FakeEngine(), config=ServeConfig(max_body_bytes=BODY_LIMIT)) as one:
        yield one


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert len(body["error"]["message"]) < 1000
    return body["error"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("name", "request_", "status", "param"), REPLAY, ids=[row[0] for row in REPLAY])
async def test_a_request_gets_its_answer_and_the_server_goes_on(
    server: ApiServer, name: str, request_: tuple[str, Any], status: int, param: str | None
) -> None:
    path, body = request_
    if isinstance(body, bytes):
        response = await server.client.post(path, content=body, headers={"content-type": "application/json"})
    else:
        response = await server.post(path, body)
    if status == 200:
        assert response.status_code == 200, response.text
    else:
        assert check_error(response, status)["param"] == param, response.text
    assert (await server.client.get("/health")).status_code == 200
    good = await server.chat(seed=0)
    assert good.status_code == 200
    assert good.json()["choices"][0]["finish_reason"] == "stop"
    assert server.model.engine.running == set()  # type: ignore[attr-defined]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_broken_body_is_told_where(server: ApiServer) -> None:
    response = await server.client.post("/v1/completions", content=b'{"model":\n"tiny",,}')
    assert "line 2 column 8" in check_error(response, 400)["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_window_is_told_in_the_words_that_clients_look_for(server: ApiServer) -> None:
    error = check_error(await server.complete(prompt=[5] * 1000), 400)
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]
    assert "1000" in error["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_an_unknown_model_is_told_with_the_known_ones(server: ApiServer) -> None:
    error = check_error(await server.chat(model="gpt-4"), 404)
    assert error["code"] == "model_not_found"
    assert "'tiny'" in error["message"]


@pytest.mark.parametrize(
    ("asked", "served", "close"),
    [
        ("smolm2", "smollm2", "smollm2"),
        ("Qwen3-0.6b", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("tiny.gguf", "/models/a/tiny.gguf", "/models/a/tiny.gguf"),
        ("gpt-4", "smollm2", None),
        ("smollm2" * 100_000, "smollm2", None),
    ],
)
def test_a_mistyped_model_is_told_with_the_name_that_is_close(asked: str, served: str, close: str | None) -> None:
    message = str(UnknownModelError(asked, [served]))
    assert f"Served: {served!r}." in message
    assert ("Did you mean" in message) is (close is not None)
    if close is not None:
        assert message.endswith(f"Did you mean {close!r}?")
    assert len(message) < 300


@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_without_a_length_is_bounded_too(server: ApiServer) -> None:
    async def parts():  # noqa: ANN202
        for _ in range(40):
            yield b" " * 10_000

    response = await server.client.post("/v1/completions", content=parts())
    assert "transfer-encoding" in response.request.headers
    assert check_error(response, 413)["code"] == "request_too_large"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (None, 200),
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("application/x-www-form-urlencoded", 400),
        ("text/plain", 400),
        ("multipart/form-data; boundary=x", 400),
    ],
)
async def test_only_json_is_taken(server: ApiServer, content_type: str | None, status: int) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    body = json.dumps(completion_body()).encode()
    response = await server.client.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == status, response.text


@pytest.mark.asyncio(loop_scope="module")
async def test_a_compressed_body_is_refused_by_the_name_of_its_encoding(server: ApiServer) -> None:
    body = json.dumps(completion_body()).encode()
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = await server.client.post("/v1/completions", content=gzip.compress(body), headers=headers)
    assert check_error(response, 400)["code"] == "unsupported_content_encoding"
    headers["content-encoding"] = "identity"
    assert (await server.client.post("/v1/completions", content=body, headers=headers)).status_code == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_unknown_urls_and_methods_have_nested_errors(server: ApiServer) -> None:
    error = check_error(await server.client.get("/v1/embeddings"), 404)
    assert error["code"] == "unknown_url"
    assert "GET /v1/embeddings" in error["message"]
    response = await server.client.get("/v1/chat/completions")
    check_error(response, 405)
    assert response.headers["allow"] == "POST"
    check_error(await server.client.post("/health"), 405)
    check_error(await server.client.options("/v1/chat/completions"), 405)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_huge_faulty_body_gets_a_short_answer(server: ApiServer) -> None:
    response = await server.chat(messages=[{"role": "x" * 50_000, "content": "a"}] * 3)
    check_error(response, 400)
    assert len(response.content) < 1000


async def test_a_fault_that_nobody_foresaw_behind_the_framework_is_told_and_counted_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(FakeEngine()) as server:

        def fail(self: object) -> None:
            raise ZeroDivisionError("secret detail")

        monkeypatch.setattr(Service, "state", fail)
        response = await server.client.get("/health", headers={"x-request-id": "mine"})
        monkeypatch.undo()
        metrics = (await server.client.get("/metrics")).text
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert response.headers["x-request-id"] == "mine"
    assert 'headrace_http_requests_total{route="/health",status="500"} 1.0' in metrics
