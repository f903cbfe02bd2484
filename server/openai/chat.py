"""POST /v1/chat/completions: messages to choices, and the two forms of the answer."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import RequestError
from server.access.record import Caller
from server.openai.body import parse_body
from server.openai.chat_body import ChatBody
from server.openai.exchange import Prepared
from server.openai.extras import ignored_params
from server.openai.generation import Answer, ChoiceRun, Piece, Usage
from server.openai.logprobs import IdNames, TokenNames, chat_logprobs, prompt_logprobs
from server.openai.sampling import Wanted, checked_constraint, choice_runs
from server.openai.sse import (
    NOT_FINISHED,
    Envelope,
    Frame,
    encode_json,
    encoded,
    event_json,
    finished,
    json_text,
    new_envelope,
    usage_fields,
)
from server.openai.truncation import kept_tokens
from server.service import Service


async def prepare_chat(service: Service, body: bytes, caller: Caller) -> Prepared:
    """Check, render and tokenise. Raises what the client is to be told instead of an answer."""
    request = await parse_body(body, ChatBody)
    ignored = ignored_params(request)
    model = service.model(request.model)
    _check(request)
    text = model.require_text()
    continues = request.continue_final_message
    prompt_ids = await text.chat_ids(
        [message.for_template() for message in request.messages],
        add_generation_prompt=not continues if request.add_generation_prompt is None else request.add_generation_prompt,
        continue_final_message=continues,
        variables=request.chat_template_kwargs,
        keep=kept_tokens(request.truncate_prompt_tokens, text.info, request.token_limit),
    )
    envelope = new_envelope("chatcmpl", text.info)
    wanted = Wanted(
        request.token_limit,
        request.token_logprobs,
        prompt_logprobs=request.prompt_logprobs,
        bad_words=await text.bad_word_ids(request.bad_words),
        constraint=await checked_constraint(text, request),
        names=_client_names(request),
    )
    runs = choice_runs(service, model.engine, text, request, wanted, [prompt_ids], envelope.id, caller)
    return Prepared(
        runs=runs,
        envelope=envelope,
        format=ChatFormat(envelope, text.codec, runs, request),
        stream=request.stream,
        include_usage=request.include_usage,
        ignored=ignored,
        continuous_usage=request.continuous_usage,
    )


def _client_names(request: ChatBody) -> dict[str, str]:
    limit = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    return {"prompt": "messages", "max_tokens": limit}


def _check(request: ChatBody) -> None:
    """What no single field can say."""
    request.check_streaming()
    if request.top_logprobs and not request.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs", value=request.top_logprobs)
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestError(
            "'continue_final_message' and 'add_generation_prompt' exclude each other.", param="continue_final_message"
        )


class ChatFormat:
    """Chunks: the role, then text, then a finish without text. The bytes around a choice's text are built once."""

    def __init__(self, envelope: Envelope, names: TokenNames, runs: Sequence[ChoiceRun], request: ChatBody) -> None:
        self._envelope = envelope
        self._names = IdNames(names) if request.return_tokens_as_token_ids else names
        self._runs = runs
        self._prompt_logprobs = request.prompt_logprobs
        self._shows_ids = request.return_token_ids
        self._frame = frame = Frame(envelope, "chat.completion.chunk", request.include_usage)
        self._starts = [frame.before_choice(run.index) + b',"delta":' for run in runs]
        self._text_starts = [start + b'{"content":' for start in self._starts]
        self._text_end = b'},"logprobs":null' + frame.after_choice()

    def opening(self, index: int) -> bytes:
        role = b'{"role":"assistant","content":"","refusal":null},"logprobs":null'
        behind = b""
        if self._shows_ids and index == 0:
            behind = b',"prompt_token_ids":' + encode_json(self._runs[0].request.prompt_ids)
        return self._starts[index] + role + self._frame.after_choice(behind=behind)

    def piece(self, piece: Piece) -> bytes:
        ids = b"" if piece.ids is None else b',"token_ids":' + encode_json(piece.ids)
        if piece.finish_reason is not None:
            end = self._frame.after_choice(finished(piece.finish_reason, piece.stop_reason) + ids)
            return self._starts[piece.index] + b'{},"logprobs":' + self._logprobs(piece) + end
        start = self._text_starts[piece.index] + json_text(piece.text)
        if piece.tokens is None and not ids:
            return start + self._text_end
        return start + b'},"logprobs":' + self._logprobs(piece) + self._frame.after_choice(NOT_FINISHED + ids)

    def usage(self, usage: Usage) -> bytes:
        return self._frame.usage(usage)

    def with_usage(self, chunk: bytes, usage: Usage) -> bytes:
        return self._frame.with_usage(chunk, usage)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = [encoded(self._choice(answer)) for answer in answers]
        fields = self._envelope.fields("chat.completion")
        prompt = self._runs[0]
        if self._shows_ids:
            fields["prompt_token_ids"] = prompt.request.prompt_ids
        if self._prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(prompt, self._prompt_logprobs, self._names)
        return encode_json({**fields, "choices": choices, "usage": usage_fields(usage)})

    def _choice(self, answer: Answer) -> dict[str, object]:
        return {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": None if answer.tokens is None else chat_logprobs(answer.tokens, self._names),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            **({} if answer.ids is None else {"token_ids": answer.ids}),
        }

    def _logprobs(self, piece: Piece) -> bytes:
        return event_json(chat_logprobs(piece.tokens, self._names)) if piece.tokens else b"null"
