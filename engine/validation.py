"""The door: turns a request into one whose every value is in range, or names the parameter that is not.

Used by the API process before it answers 200, and again by the engine core, which trusts nobody; the result of one
pass goes through the next unchanged. Behind it the loop never checks user data again.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import msgspec
import numpy as np

from engine.errors import PromptTooLongError, RequestError, UnsupportedError
from engine.protocol import EngineInfo, GenerateRequest, Grammar, SamplingParams
from kvstore.keys import KEY_BYTES

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
"""Token sequences: a word of the client's may be several."""
MAX_BAD_WORD_TOKENS = 64
MAX_ID_CHARS = 256
MAX_TRACE_CHARS = 512
MAX_GRAMMAR_BYTES = 128 << 10
GRAMMAR_PARAM = "structured_outputs"
GREEDY_BELOW = 1e-5
"""Temperatures below this divide logits past the range of float32 for no gain over greedy."""

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


def validate(request: GenerateRequest, info: EngineInfo) -> GenerateRequest:
    """Return `request` with its limits resolved for an engine: max_tokens set, the window observed.

    Raises RequestError (PromptTooLongError, UnsupportedError) with the parameter's name as a client knows it.
    """
    _check_supported(request)
    _check_envelope(request)
    window = sequence_window(info)
    if not request.prompt_ids:
        raise RequestError("prompt must have at least one token", param="prompt", value=[])
    if len(request.prompt_ids) >= window:  # before its ids are looked at, which costs time for millions of them
        raise PromptTooLongError(len(request.prompt_ids), window, param="prompt")
    _check_token_ids(request.prompt_ids, "prompt", info.vocab_size)
    _check_token_ids(request.resume_ids, "resume_ids", info.vocab_size)
    sampling = _check_sampling(request.sampling, info)
    sampling = _resolve_lengths(sampling, len(request.prompt_ids), window, info.max_model_len)
    if request.resume_ids and len(request.resume_ids) >= (sampling.max_tokens or 0):
        raise RequestError(
            f"resume_ids has {len(request.resume_ids)} tokens, which leaves none of the {sampling.max_tokens} allowed",
            param="resume_ids",
            value=len(request.resume_ids),
        )
    _check_int("prompt_logprobs", request.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
    return request if sampling is request.sampling else msgspec.structs.replace(request, sampling=sampling)


def sequence_window(info: EngineInfo) -> int:
    """Return how many tokens one sequence may have: the model's window, or the KV pool where that is smaller."""
    return min(info.max_model_len, info.kv_capacity_tokens)


def _check_supported(request: GenerateRequest) -> None:
    if request.kv_ticket is not None:
        raise UnsupportedError("this engine takes no KV from another engine yet", param="kv_ticket")
    if request.mode != "full":
        raise UnsupportedError("this engine does not split prefill and decode yet", param="mode", value=request.mode)


def _check_envelope(request: GenerateRequest) -> None:
    if not 0 < len(request.request_id) <= MAX_ID_CHARS:
        raise _out_of_range("request_id", request.request_id[:MAX_ID_CHARS], f"have 1 to {MAX_ID_CHARS} characters")
    if request.group_id is not None and len(request.group_id) > MAX_ID_CHARS:
        raise _out_of_range("group_id", request.group_id[:MAX_ID_CHARS], f"have at most {MAX_ID_CHARS} characters")
    for name, trace in (("traceparent", request.traceparent), ("tracestate", request.tracestate)):
        if trace is not None and len(trace) > MAX_TRACE_CHARS:
            raise _out_of_range(name, None, f"have at most {MAX_TRACE_CHARS} characters")
    if len(request.cache_scope) != KEY_BYTES:
        raise _out_of_range("cache_scope", len(request.cache_scope), f"have {KEY_BYTES} bytes")
    if request.grammar is not None:
        check_grammar(request.grammar)
    _check_int("attempt", request.attempt, 0, _INT32_MAX)
    _check_int("priority", request.priority, _INT32_MIN, _INT32_MAX)
    if request.deadline_unix_s is not None:
        _check_number("deadline_unix_s", request.deadline_unix_s, -math.inf, math.inf)


def check_grammar(grammar: Grammar) -> None:
    """Check what needs no compiling."""
    try:
        size = len(grammar.source.encode())
    except UnicodeEncodeError as error:
        raise RequestError("the grammar holds a lone surrogate, which is no character", param=GRAMMAR_PARAM) from error
    if size > MAX_GRAMMAR_BYTES:
        raise _out_of_range(GRAMMAR_PARAM, size, f"have a source of at most {MAX_GRAMMAR_BYTES} bytes")


def _check_token_ids(ids: Sequence[int], param: str, vocab_size: int) -> None:
    """Check all ids at C speed: prompts have up to a million of them."""
    if isinstance(ids, array) and ids.typecode == "I":
        if ids and (worst := int(np.frombuffer(ids, np.uint32).max())) >= vocab_size:
            raise _outside(param, worst, vocab_size)
        return
    try:
        words = array("q", ids)
    except (TypeError, OverflowError) as error:
        raise RequestError(f"{param} has a token id that is not a 64-bit integer", param=param) from error
    # As unsigned numbers those below 0 are the largest: one look tells that all are right.
    if words and np.frombuffer(words, np.uint64).max() >= vocab_size:
        values = np.frombuffer(words, np.int64)
        for worst in (int(values.min()), int(values.max())):
            if not 0 <= worst < vocab_size:
                raise _outside(param, worst, vocab_size)


def _outside(param: str, token: int, vocab_size: int) -> RequestError:
    return RequestError(
        f"{param} has token id {token}, outside the vocabulary [0, {vocab_size})", param=param, value=token
    )


def _check_sampling(sampling: SamplingParams, info: EngineInfo) -> SamplingParams:
    _check_number("temperature", sampling.temperature, 0.0, 2.0)
    _check_number("top_p", sampling.top_p, 0.0, 1.0, above=True)
    _check_number("min_p", sampling.min_p, 0.0, 1.0)
    _check_int("top_k", sampling.top_k, -1, _INT64_MAX)
    _check_int("seed", sampling.seed, _INT64_MIN, _INT64_MAX, optional=True)
    _check_int("logprobs", sampling.logprobs, 0, MAX_LOGPROBS, optional=True)
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise _out_of_range("stop_token_ids", len(sampling.stop_token_ids), f"have at most {MAX_STOP_TOKEN_IDS} ids")
    _check_token_ids(sampling.stop_token_ids, "stop_token_ids", info.vocab_size)
    _check_edits(sampling, info)
    temperature = 0.0 if sampling.temperature < GREEDY_BELOW else sampling.temperature
    top_k = min(max(sampling.top_k, 0), info.vocab_size)
    if temperature == sampling.temperature and top_k == sampling.top_k:
        return sampling
    return msgspec.structs.replace(sampling, temperature=temperature, top_k=top_k)


def _check_edits(sampling: SamplingParams, info: EngineInfo) -> None:
    """Check what changes logits before the choice."""
    _check_number("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _check_number("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    _check_number("repetition_penalty", sampling.repetition_penalty, 0.01, 10.0)
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise _out_of_range("logit_bias", len(sampling.logit_bias), f"have at most {MAX_LOGIT_BIAS} entries")
    _check_token_ids(tuple(sampling.logit_bias), "logit_bias", info.vocab_size)
    for value in sampling.logit_bias.values():
        _check_number("logit_bias", value, -100.0, 100.0)
    if len(sampling.bad_words) > MAX_BAD_WORDS:
        raise _out_of_range("bad_words", len(sampling.bad_words), f"be at most {MAX_BAD_WORDS} token sequences")
    for word in sampling.bad_words:
        if not 0 < len(word) <= MAX_BAD_WORD_TOKENS:
            raise _out_of_range("bad_words", len(word), f"each have 1 to {MAX_BAD_WORD_TOKENS} tokens")
        _check_token_ids(word, "bad_words", info.vocab_size)
    if sampling.allowed_token_ids is not None:
        _check_allowed(sampling, sampling.allowed_token_ids, info)


def _check_allowed(sampling: SamplingParams, allowed: tuple[int, ...], info: EngineInfo) -> None:
    if not 0 < len(allowed) <= info.vocab_size:
        raise _out_of_range("allowed_token_ids", len(allowed), f"have 1 to {info.vocab_size} ids")
    _check_token_ids(allowed, "allowed_token_ids", info.vocab_size)
    banned = {word[0] for word in sampling.bad_words if len(word) == 1}
    if sampling.min_tokens:
        banned.update(sampling.stop_token_ids, () if sampling.ignore_eos else info.eos_ids)
    if banned.issuperset(allowed):
        raise RequestError(
            "allowed_token_ids has only tokens that bad_words or min_tokens forbid", param="allowed_token_ids"
        )


def _resolve_lengths(sampling: SamplingParams, prompt_len: int, window: int, max_model_len: int) -> SamplingParams:
    """Set max_tokens to what the window leaves: None means all of it, and more than that is cut."""
    rest = window - prompt_len
    _check_int("max_tokens", sampling.max_tokens, 0, max_model_len, optional=True)
    most = max_model_len if sampling.max_tokens is None else sampling.max_tokens
    _check_int("min_tokens", sampling.min_tokens, 0, most)
    max_tokens = min(most, rest)
    min_tokens = min(sampling.min_tokens, max_tokens)
    if max_tokens == sampling.max_tokens and min_tokens == sampling.min_tokens:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens)


def _check_number(param: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """Check that `value` is a finite number in [low, high], or in (low, high] with `above`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _out_of_range(param, value, "be a number")
    if not math.isfinite(value):
        raise _out_of_range(param, str(value), "be finite")
    if value < low or value > high or (above and value == low):
        raise _out_of_range(param, value, f"be in {'(' if above else '['}{low:g}, {high:g}]")


def _check_int(param: str, value: int | None, low: int, high: int, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise _out_of_range(param, value, "be an integer")
    if not low <= value <= high:
        raise _out_of_range(param, value, f"be in [{low}, {high}]")


def _out_of_range(param: str, value: object, rule: str) -> RequestError:
    shown = "" if value is None else f", got {value!r}"
    return RequestError(f"{param} must {rule}{shown}", param=param, value=value)
