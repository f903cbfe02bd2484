"""SGLang's native /generate with `input_ids`, whose events carry `output_ids`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from engine.errors import EngineDiedError
from engine.protocol import EngineInfo, GenerateRequest, TokenLogprobs
from kvstore.keys import PUBLIC_SCOPE
from server.foreign.dialect import (
    Piece,
    answer_of,
    check_common,
    logprob,
    min_tokens_left,
    no_ids,
    tokens_left,
    unsupported,
)

TokenEntry = tuple[float | None, int, object]
"""(logprob, token id, text)"""


class FinishReason(msgspec.Struct, frozen=True):
    type: str
    message: str | None = None


class Meta(msgspec.Struct, frozen=True):
    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    output_token_logprobs: list[TokenEntry] | None = None
    output_top_logprobs: list[list[TokenEntry] | None] | None = None


class Answer(msgspec.Struct, frozen=True):
    text: str = ""
    output_ids: list[int] | None = None
    meta_info: Meta = Meta()
    error: object = None


class SGLang:
    name = "sglang"
    path = "/generate"

    def check(self, request: GenerateRequest) -> None:
        check_common(request)
        if request.grammar is not None and request.grammar.kind not in ("json_schema", "regex"):
            raise unsupported("structured_outputs")
        if request.sampling.allowed_token_ids is not None:
            raise unsupported("allowed_token_ids")

    def body(self, request: GenerateRequest, info: EngineInfo) -> Mapping[str, object]:
        sampling = request.sampling
        parameters: dict[str, object] = {
            "max_new_tokens": tokens_left(request, info),
            "min_new_tokens": min_tokens_left(request),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if sampling.seed is not None:
            parameters["sampling_seed"] = sampling.seed
        if sampling.logit_bias:
            parameters["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        if request.grammar is not None:
            parameters[request.grammar.kind] = request.grammar.source
        body: dict[str, object] = {
            "input_ids": [*request.prompt_ids, *request.resume_ids],
            "sampling_params": parameters,
            "stream": True,
        }
        if sampling.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": sampling.logprobs, "logprob_start_len": -1}
        if request.cache_scope != PUBLIC_SCOPE:
            body["extra_key"] = request.cache_scope.hex()
        return body

    def reader(self, request: GenerateRequest) -> SGLangReader:
        return SGLangReader(request.sampling.logprobs)


class SGLangReader:
    """Events tell all ids so far or only the new ones, depending on how the server was started; the count of completion
    tokens tells which of them are new in either case."""

    tells_cached_last = False

    def __init__(self, alternatives: int | None) -> None:
        self._alternatives = alternatives
        self._seen = 0
        self._seen_logprobs = 0

    def read(self, data: bytes) -> Piece | None:
        answer = answer_of(data, Answer)
        if answer is None:
            return None
        if answer.output_ids is None:
            if answer.text:
                raise no_ids()
            return None
        meta = answer.meta_info
        fresh = meta.completion_tokens - self._seen
        if not 0 <= fresh <= len(answer.output_ids):
            raise EngineDiedError("The engine skipped tokens.")
        self._seen = meta.completion_tokens
        return Piece(
            token_ids=answer.output_ids[len(answer.output_ids) - fresh :],
            logprobs=self._logprobs(meta),
            finish_reason=None if meta.finish_reason is None else _reason(meta.finish_reason),
            cached_tokens=meta.cached_tokens,
        )

    def _logprobs(self, meta: Meta) -> list[TokenLogprobs]:
        if self._alternatives is None or meta.output_token_logprobs is None:
            return []
        told = meta.output_token_logprobs
        tops: Sequence[list[TokenEntry] | None] = meta.output_top_logprobs or [None] * len(told)
        fresh = min(self._seen - self._seen_logprobs, len(told))
        self._seen_logprobs += fresh
        start = len(told) - fresh
        return [_entry(chosen, top or ()) for chosen, top in zip(told[start:], tops[start:], strict=False)]


def _entry(chosen: TokenEntry, top: Sequence[TokenEntry]) -> TokenLogprobs:
    return TokenLogprobs(logprob(chosen[0]), [entry[1] for entry in top], [logprob(entry[0]) for entry in top])


def _reason(reason: FinishReason) -> Literal["stop", "length"]:
    match reason.type:
        case "stop" | "length" as kind:
            return kind
    raise EngineDiedError(f"The engine ended the request: {(reason.message or reason.type)[:200]}")
