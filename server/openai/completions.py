"""POST /v1/completions: prompts in four forms to choices, and the two forms of the answer."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import RequestError
from server.access.record import Caller
from server.openai.body import parse_body
from server.openai.completion_body import MAX_PROMPTS, CompletionBody
from server.openai.exchange import Prepared
from server.openai.extras import ignored_params
from server.openai.generation import Answer, Piece, Usage
from server.openai.logprobs import TokenNames, completion_logprobs
from server.openai.sampling import Wanted, choice_runs
from server.openai.sse import Envelope, Frame, encode_json, event_json, finished, json_text, new_envelope, usage_fields
from server.service import Service


async def prepare_completion(service: Service, body: bytes, caller: Caller) -> Prepared:
    """Check and tokenise. Raises what the client is to be told instead of an answer."""
    request = await parse_body(body, CompletionBody)
    ignored = ignored_params(request)
    service.check_model(request.model)
    request.check_stream_options()
    if len(request.prompt) * request.n > MAX_PROMPTS:
        raise RequestError(f"Prompts times 'n' may be {MAX_PROMPTS} at most.", param="n", value=request.n)
    text = service.require_text()
    prompts = await text.prompts_ids(request.prompt, add_special_tokens=request.add_special_tokens)
    envelope = new_envelope("cmpl", text.info)
    wanted = Wanted(request.token_limit, request.logprobs, with_offsets=request.logprobs is not None)
    runs = choice_runs(service, text, request, wanted, prompts, envelope.id, caller)
    return Prepared(
        runs=runs,
        envelope=envelope,
        format=CompletionFormat(envelope, text.codec, len(runs), include_usage=request.include_usage),
        stream=request.stream,
        include_usage=request.include_usage,
        ignored=ignored,
    )


class CompletionFormat:
    """Chunks: text, then a finish without text."""

    def __init__(self, envelope: Envelope, names: TokenNames, choices: int, *, include_usage: bool) -> None:
        self._envelope = envelope
        self._names = names
        self._frame = frame = Frame(envelope, "text_completion", include_usage)
        self._starts = [frame.before_choice(index) + b',"text":' for index in range(choices)]
        self._text_end = b',"logprobs":null' + frame.after_choice()

    def opening(self, index: int) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        start = self._starts[piece.index] + json_text(piece.text)
        if piece.tokens is None and piece.finish_reason is None:
            return start + self._text_end
        logprobs = event_json(completion_logprobs(piece.tokens, self._names)) if piece.tokens else b"null"
        end = (
            self._frame.after_choice(finished(piece.finish_reason))
            if piece.finish_reason
            else self._frame.after_choice()
        )
        return start + b',"logprobs":' + logprobs + end

    def usage(self, usage: Usage) -> bytes:
        return self._frame.usage(usage)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = [
            {
                "index": answer.index,
                "text": answer.text,
                "logprobs": None if answer.tokens is None else completion_logprobs(answer.tokens, self._names),
                "finish_reason": answer.finish_reason,
            }
            for answer in answers
        ]
        fields = self._envelope.fields("text_completion")
        return encode_json({**fields, "choices": choices, "usage": usage_fields(usage)})
