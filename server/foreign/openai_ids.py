"""/v1/completions with `return_token_ids`, as vLLM and this server have it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from engine.errors import EngineDiedError
from engine.protocol import EngineInfo, GenerateRequest, Grammar, TokenLogprobs
from kvstore.keys import PUBLIC_SCOPE
from server.foreign.dialect import Piece, answer_of, check_common, logprob, min_tokens_left, no_ids, tokens_left

ID_NAME = "token_id:"


class Logprobs(msgspec.Struct, frozen=True):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float | None] | None] | None = None


class Choice(msgspec.Struct, frozen=True):
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct, frozen=True):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: object = None


class OpenAIIds:
    name = "openai"
    path = "/v1/completions"

    def check(self, request: GenerateRequest) -> None:
        check_common(request)

    def body(self, request: GenerateRequest, info: EngineInfo) -> Mapping[str, object]:
        sampling = request.sampling
        body: dict[str, object] = {
            "model": info.model,
            "prompt": [*request.prompt_ids, *request.resume_ids],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
            "skip_special_tokens": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "max_tokens": tokens_left(request, info),
        }
        optional = {
            "seed": sampling.seed,
            "min_tokens": min_tokens_left(request) or None,
            "stop_token_ids": list(sampling.stop_token_ids) or None,
            "ignore_eos": sampling.ignore_eos or None,
            "presence_penalty": sampling.presence_penalty or None,
            "frequency_penalty": sampling.frequency_penalty or None,
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
            "allowed_token_ids": None if sampling.allowed_token_ids is None else list(sampling.allowed_token_ids),
            "logprobs": sampling.logprobs,
            "return_tokens_as_token_ids": None if sampling.logprobs is None else True,
            "structured_outputs": None if request.grammar is None else _structured(request.grammar),
            "priority": request.priority or None,
            "cache_salt": None if request.cache_scope == PUBLIC_SCOPE else request.cache_scope.hex(),
        }
        return body | {name: value for name, value in optional.items() if value is not None}

    def reader(self, request: GenerateRequest) -> OpenAIReader:
        return OpenAIReader(request.sampling.logprobs)


class OpenAIReader:
    """`alternatives` is how many logprobs were asked for beside the chosen token's, None for none at all."""

    tells_cached_last = True

    def __init__(self, alternatives: int | None) -> None:
        self._alternatives = alternatives

    def read(self, data: bytes) -> Piece | None:
        chunk = answer_of(data, Chunk)
        if chunk is None:
            return None
        details = None if chunk.usage is None else chunk.usage.prompt_tokens_details
        cached = None if details is None else details.cached_tokens
        if not chunk.choices:
            return None if cached is None else Piece(cached_tokens=cached)
        choice = chunk.choices[0]
        if choice.token_ids is None and choice.text:
            raise no_ids()
        match choice.finish_reason:
            case None | "stop" | "length" as reason:
                return Piece(
                    token_ids=choice.token_ids or (),
                    logprobs=self._logprobs(choice.logprobs),
                    finish_reason=reason,
                    cached_tokens=cached,
                )
            case other:
                raise EngineDiedError(f"The engine ended the request ({other[:50]}).")

    def _logprobs(self, told: Logprobs | None) -> list[TokenLogprobs]:
        if told is None or self._alternatives is None:
            return []
        tops = told.top_logprobs or [None] * len(told.token_logprobs)
        return [
            _token_logprobs(chosen, top or {}, self._alternatives)
            for chosen, top in zip(told.token_logprobs, tops, strict=False)
        ]


def _token_logprobs(chosen: float | None, top: Mapping[str, float | None], count: int) -> TokenLogprobs:
    """The chosen token is among the alternatives whether or not it is one of the best: those are kept."""
    best = sorted(((logprob(value), -_id(name)) for name, value in top.items()), reverse=True)[:count]
    return TokenLogprobs(logprob(chosen), [-negative for _, negative in best], [value for value, _ in best])


def _id(name: str) -> int:
    try:
        return int(name.removeprefix(ID_NAME))
    except ValueError:
        raise EngineDiedError("The engine names tokens of logprobs by their text, not by their ids.") from None


def _structured(grammar: Grammar) -> Mapping[str, object]:
    match grammar.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": grammar.source}
        case "choice":
            return {"choice": msgspec.json.decode(grammar.source)}
        case kind:
            return {kind: grammar.source}
