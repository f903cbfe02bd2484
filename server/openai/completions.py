"""POST /v1/completions: prompts in four forms to choices, and the two forms of the answer."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import RequestError
from server.access.record import Caller
from server.openai.body import parse_body
from server.openai.completion_body import CompletionBody
from server.openai.echo import Echo, echo_of
from server.openai.exchange import Prepared
from server.openai.extras import ignored_params
from server.openai.generation import Answer, ChoiceRun, Piece, Usage
from server.openai.logprobs import IdNames, TokenNames, completion_logprobs, prompt_logprobs
from server.openai.sampling import Wanted, check_prompt_values, checked_constraint, choice_runs
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
from server.text_service import TextService


async def prepare_completion(service: Service, body: bytes, caller: Caller) -> Prepared:
    """Check and tokenise. Raises what the client is to be told instead of an answer."""
    request = await parse_body(body, CompletionBody)
    ignored = ignored_params(request)
    model = service.model(request.model)
    request.check_streaming()
    _check_count(request, service.config.max_prompts)
    text = model.require_text()
    prompts = await text.prompts_ids(
        request.prompt,
        add_special_tokens=request.add_special_tokens,
        keep=kept_tokens(request.truncate_prompt_tokens, text.info, request.token_limit),
    )
    envelope = new_envelope("cmpl", text.info)
    wanted = Wanted(
        request.token_limit,
        request.logprobs,
        with_offsets=request.logprobs is not None,
        prompt_logprobs=request.wanted_prompt_logprobs,
        echoes=await _echoes(text, request, prompts),
        bad_words=await text.bad_word_ids(request.bad_words),
        constraint=await checked_constraint(text, request),
    )
    runs = choice_runs(service, model.engine, text, request, wanted, prompts, envelope.id, caller)
    return Prepared(
        runs=runs,
        envelope=envelope,
        format=CompletionFormat(envelope, text.codec, runs, request),
        stream=request.stream,
        include_usage=request.include_usage,
        ignored=ignored,
        continuous_usage=request.continuous_usage,
    )


def _check_count(request: CompletionBody, limit: int) -> None:
    if len(request.prompt) > limit:
        raise RequestError(f"At most {limit} prompts are allowed.", param="prompt")
    if len(request.prompt) * request.n > limit:
        raise RequestError(f"Prompts times 'n' may be {limit} at most.", param="n", value=request.n)


async def _echoes(text: TextService, request: CompletionBody, ids: Sequence[list[int]]) -> list[Echo]:
    if not request.echo:
        return []
    check_prompt_values(sum(map(len, ids)) * request.n, request.wanted_prompt_logprobs or 0)
    codec, size = text.codec, text.info.vocab_size
    if any(max(own, default=0) >= size for own in ids):
        return []  # token ids that stand for nothing: the engine's door names them
    # What was cut off is not shown: where it ended in the text, its tokens do not tell.
    shown = ids if request.truncate_prompt_tokens is not None else request.prompt
    pairs = list(zip(shown, ids, strict=True))
    return await text.in_thread(lambda: [echo_of(codec, prompt, own) for prompt, own in pairs])


class CompletionFormat:
    """Chunks: text, then a finish without text."""

    def __init__(
        self, envelope: Envelope, names: TokenNames, runs: Sequence[ChoiceRun], request: CompletionBody
    ) -> None:
        self._envelope = envelope
        self._names = IdNames(names) if request.return_tokens_as_token_ids else names
        self._runs = runs
        self._prompt_logprobs = request.prompt_logprobs
        self._untold_prompts = set(range(len(runs))) if request.return_token_ids else set()
        self._frame = frame = Frame(envelope, "text_completion", request.include_usage)
        self._starts = [frame.before_choice(run.index) + b',"text":' for run in runs]
        self._text_end = b',"logprobs":null' + frame.after_choice()

    def opening(self, index: int) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        start = self._starts[piece.index] + json_text(piece.text)
        if piece.tokens is None and piece.finish_reason is None and piece.ids is None:
            return start + self._text_end
        logprobs = event_json(completion_logprobs(piece.tokens, self._names)) if piece.tokens else b"null"
        finish = finished(piece.finish_reason, piece.stop_reason) if piece.finish_reason else NOT_FINISHED
        return start + b',"logprobs":' + logprobs + self._frame.after_choice(finish + self._ids(piece))

    def _ids(self, piece: Piece) -> bytes:
        """Return a piece's token ids, behind those of the prompt in a choice's first piece."""
        if piece.ids is None:
            return b""
        ids = b',"token_ids":' + encode_json(piece.ids)
        if piece.index not in self._untold_prompts:
            return ids
        self._untold_prompts.remove(piece.index)
        return b',"prompt_token_ids":' + encode_json(self._runs[piece.index].request.prompt_ids) + ids

    def usage(self, usage: Usage) -> bytes:
        return self._frame.usage(usage)

    def with_usage(self, chunk: bytes, usage: Usage) -> bytes:
        return self._frame.with_usage(chunk, usage)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = [encoded(self._choice(answer)) for answer in answers]
        fields = self._envelope.fields("text_completion")
        return encode_json({**fields, "choices": choices, "usage": usage_fields(usage)})

    def _choice(self, answer: Answer) -> dict[str, object]:
        return {
            "index": answer.index,
            "text": answer.text,
            "logprobs": None if answer.tokens is None else completion_logprobs(answer.tokens, self._names),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            **self._prompt_fields(answer),
        }

    def _prompt_fields(self, answer: Answer) -> dict[str, object]:
        run = self._runs[answer.index]
        fields: dict[str, object] = {}
        if answer.ids is not None:
            fields |= {"prompt_token_ids": run.request.prompt_ids, "token_ids": answer.ids}
        if self._prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(run, self._prompt_logprobs, self._names)
        return fields
