"""llama.cpp's server: /completion with `return_tokens`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from engine.errors import EngineDiedError
from engine.protocol import EngineInfo, GenerateRequest, TokenLogprobs
from kvstore.keys import PUBLIC_SCOPE
from server.foreign.dialect import (
    Piece,
    SkippedTokensError,
    answer_of,
    check_common,
    logprob,
    no_ids,
    tokens_left,
    unsupported,
)


class TokenProbability(msgspec.Struct, frozen=True):
    id: int
    logprob: float | None = None
    top_logprobs: list[TokenProbability] = []


class Timings(msgspec.Struct, frozen=True):
    cache_n: int | None = None


class Answer(msgspec.Struct, frozen=True):
    content: str = ""
    tokens: list[int] | None = None
    stop: bool = False
    stop_type: str = "none"
    tokens_predicted: int | None = None
    completion_probabilities: list[TokenProbability] = []
    timings: Timings | None = None
    error: object = None


class LlamaServer:
    name = "llama_server"
    path = "/completion"

    def check(self, request: GenerateRequest) -> None:
        check_common(request)
        sampling = request.sampling
        if request.grammar is not None and request.grammar.kind != "json_schema":
            raise unsupported("structured_outputs")
        for param, is_wanted in {
            "stop_token_ids": sampling.stop_token_ids,
            "min_tokens": sampling.min_tokens > len(request.resume_ids),
            "allowed_token_ids": sampling.allowed_token_ids is not None,
        }.items():
            if is_wanted:
                raise unsupported(param)

    def body(self, request: GenerateRequest, info: EngineInfo) -> Mapping[str, object]:
        sampling = request.sampling
        body: dict[str, object] = {
            "prompt": [*request.prompt_ids, *request.resume_ids],
            "n_predict": tokens_left(request, info),
            "stream": True,
            "return_tokens": True,
            # How much was cached is one of its timings, which else come with the last event only.
            "timings_per_token": True,
            # Its cache knows no scopes: only what anybody may find is kept.
            "cache_prompt": request.cache_scope == PUBLIC_SCOPE,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            "repeat_last_n": info.max_model_len,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "ignore_eos": sampling.ignore_eos,
            "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
            "logit_bias": [[token, bias] for token, bias in sampling.logit_bias.items()],
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed % 2**32
        if sampling.logprobs is not None:
            body["n_probs"] = max(1, sampling.logprobs)
        if request.grammar is not None:
            body["json_schema"] = msgspec.json.decode(request.grammar.source)
        return body

    def reader(self, request: GenerateRequest) -> LlamaReader:
        return LlamaReader(request.sampling.logprobs)

    def part_body(self, request: GenerateRequest, info: EngineInfo, count: int) -> Mapping[str, object]:
        body = self.body(request, info)
        return {**body, "stream": False, "n_predict": min(count, tokens_left(request, info))}

    def read_part(self, data: bytes, request: GenerateRequest, info: EngineInfo) -> Piece:
        answer = answer_of(data, Answer)
        if answer is None or answer.tokens is None:
            raise no_ids()
        reason = _reason(answer.stop_type)
        is_over = reason == "stop" or len(answer.tokens) >= tokens_left(request, info)
        return Piece(token_ids=answer.tokens, finish_reason=reason if is_over else None)


class LlamaReader:
    """The token that ends the text is not told: such an answer ends with "stop" and no stop token.

    Tokens that end within a character are not told either; how many were made by then tells that some are missing.
    """

    tells_cached_last = False

    def __init__(self, alternatives: int | None) -> None:
        self._alternatives = alternatives
        self._told = 0

    def read(self, data: bytes) -> Piece | None:
        answer = answer_of(data, Answer)
        if answer is None:
            return None
        if answer.content and not answer.tokens and not answer.stop:
            raise no_ids()
        # Its last event tells no new tokens when it streams.
        ids = [] if answer.stop else answer.tokens or []
        untold = 1 if answer.stop_type == "eos" else 0
        self._told += len(ids)
        if answer.tokens_predicted is not None and answer.tokens_predicted > self._told + untold:
            raise SkippedTokensError
        return Piece(
            token_ids=ids,
            logprobs=[self._entry(one) for one in answer.completion_probabilities] if ids else (),
            finish_reason=_reason(answer.stop_type) if answer.stop else None,
            cached_tokens=None if answer.timings is None else answer.timings.cache_n,
        )

    def _entry(self, one: TokenProbability) -> TokenLogprobs:
        top = one.top_logprobs[: self._alternatives or 0]
        return TokenLogprobs(
            logprob(one.logprob), [entry.id for entry in top], [logprob(entry.logprob) for entry in top]
        )


def _reason(stop_type: str) -> Literal["stop", "length"]:
    match stop_type:
        case "eos" | "word":
            return "stop"
        case "limit":
            return "length"
    raise EngineDiedError(f"The engine ended the request ({stop_type[:50]}).")
