"""One client request below the protocol: choices run in the engine and come back as pieces of text.

Owns the path from token ids to text pieces (text machine, logprobs that wait for their text, stop strings), the merging
of several choices into one sequence, and the counting of tokens. Knows no JSON and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, NamedTuple, TypeVar, cast

from engine.errors import DeadlineError, RequestError, RequestFailedError, UnsupportedError
from engine.protocol import CachedTokens, Engine, GenerateRequest, TokenLogprobs, TokenOutput
from engine.text.machine import TextDelta, TextMachine
from server.metrics import ServerMetrics
from server.openai.echo import Echo

T = TypeVar("T")

StopReason = Literal["stop", "length"]


class Token(NamedTuple):
    """A token with logprobs. `offset`, where asked for, is where its text begins in the choice's text. The first token
    of an echoed prompt has no logprobs."""

    id: int
    logprobs: TokenLogprobs | None
    offset: int


MERGE_QUEUE_PIECES = 64
"""A slow client makes the choices wait here; behind it the engine's link coalesces."""


@dataclass(slots=True)
class Piece:
    """Some text of one choice. `tokens` are those whose text is complete with it, None when they were not asked for.

    `ids` are the output tokens since the choice's piece before, None when they were not asked for. The piece with
    `finish_reason` is the choice's last and has no text; `stop_reason` is the stop string or token that ended it.
    """

    index: int
    text: str
    tokens: list[Token] | None = None
    finish_reason: StopReason | None = None
    stop_reason: str | int | None = None
    ids: list[int] | None = None


@dataclass(slots=True)
class RequestClock:
    """When a request arrived, for the latency metrics of all its choices."""

    metrics: ServerMetrics
    arrived_s: float = field(default_factory=perf_counter)
    ttft_s: float | None = None

    def output(self, last_s: float, tokens: int) -> float:
        """Note an output of one choice, whose previous one was at `last_s` (0 for none). Return the time now."""
        now = perf_counter()
        if last_s:
            self.metrics.itl.observe((now - last_s) / tokens)
        elif self.ttft_s is None:
            self.ttft_s = now - self.arrived_s
            self.metrics.ttft.observe(self.ttft_s)
        return now


class ChoiceRun:
    """One choice of one prompt. Iterate `pieces` once; the counts are right at any moment, also after an abort.

    With `echo` the prompt is its first piece. `prompt_logprobs` are there from the first piece on, if asked for.
    """

    def __init__(
        self,
        index: int,
        engine: Engine,
        request: GenerateRequest,
        machine: TextMachine,
        *,
        echo: Echo | None = None,
        wants_ids: bool = False,
    ) -> None:
        self.index = index
        self.engine = engine
        self.request = request
        self.machine = machine
        self.completion_tokens = 0
        self.cached = CachedTokens()
        self.finish_reason: StopReason | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.stop_reason: str | int | None = None
        self._echo = echo
        self._text_start = 0 if echo is None else len(echo.text)
        self._wants_ids = wants_ids
        self._told_ids = 0
        self._untold_ids: list[int] = []
        self._wants_logprobs = request.sampling.logprobs is not None
        self._undecoded: deque[tuple[int, TokenLogprobs]] = deque()
        self._untold: list[Token] = []

    async def pieces(self, clock: RequestClock) -> AsyncGenerator[Piece, None]:
        """Yield the choice's text as it becomes certain. Closing early aborts the choice in the engine."""
        last_s = 0.0
        outputs = cast(AsyncGenerator[TokenOutput, None], self.engine.generate(self.request))
        async with aclosing(outputs):
            async for output in outputs:
                if output.token_ids:
                    last_s = clock.output(last_s, len(output.token_ids))
                text, reason = self._take(output)
                if reason is not None and output.finish_reason is None:
                    await self.engine.finish(self.request.request_id, self.completion_tokens)
                if self._echo is not None:
                    yield self._echoed(self._echo)
                    self._echo = None
                if text:
                    yield Piece(self.index, text, self._tell_tokens(), ids=self._tell_ids())
                if reason is not None:
                    self.finish_reason = reason
                    yield Piece(self.index, "", self._tell_tokens(), reason, self.stop_reason, self._tell_ids())
                    return

    def _take(self, output: TokenOutput) -> tuple[str, StopReason | None]:
        """Count and decode one output. Return the text that it makes certain, and why the choice ends with it."""
        ids, reason = output.token_ids, output.finish_reason
        if output.cached is not None:
            self.cached = output.cached
        if reason == "abort" or reason == "error":
            raise _failure(output)
        self.completion_tokens = output.offset + len(ids)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if self._wants_ids:
            self._untold_ids += ids
        if self._wants_logprobs:
            self._undecoded.extend(zip(ids, output.logprobs or (), strict=True))
        delta = self.machine.push(ids, stop_token=output.stop_token)
        self._note_tokens(delta)
        text = delta.text
        if reason is not None and delta.stop is None:
            delta = self.machine.end(reason)
            self._note_tokens(delta)
            text += delta.text
        if delta.stop is None:
            if output.stop_token in self.request.sampling.stop_token_ids:
                self.stop_reason = output.stop_token
            return text, reason
        # Tokens behind a stop string are overshoot: neither usage nor logprobs know them.
        self.completion_tokens = delta.stop.keep_tokens
        self.stop_reason = delta.stop.string
        del self._untold_ids[max(0, delta.stop.keep_tokens - self._told_ids) :]
        return text, "stop"

    def _echoed(self, echo: Echo) -> Piece:
        """Return the prompt as a piece, its tokens with their logprobs if the output's have them."""
        tokens = None
        if self._wants_logprobs and self.prompt_logprobs is not None:
            prompt = zip(self.request.prompt_ids, self.prompt_logprobs, echo.offsets, strict=True)
            count = self.request.sampling.logprobs or 0
            tokens = [Token(token, cut(logprobs, count), offset) for token, logprobs, offset in prompt]
        return Piece(self.index, echo.text, tokens, ids=[] if self._wants_ids else None)

    def _note_tokens(self, delta: TextDelta) -> None:
        if self._wants_logprobs:
            offsets = delta.offsets or (0,) * delta.tokens
            start = self._text_start
            self._untold += (Token(*self._undecoded.popleft(), start + offset) for offset in offsets)

    def _tell_tokens(self) -> list[Token] | None:
        if not self._wants_logprobs:
            return None
        tokens, self._untold = self._untold, []
        return tokens

    def _tell_ids(self) -> list[int] | None:
        if not self._wants_ids:
            return None
        ids, self._untold_ids = self._untold_ids, []
        self._told_ids += len(ids)
        return ids


def cut(logprobs: TokenLogprobs | None, count: int) -> TokenLogprobs | None:
    """Return the logprobs with at most `count` alternatives."""
    if logprobs is None or len(logprobs.top_ids) <= count:
        return logprobs
    return TokenLogprobs(logprobs.logprob, logprobs.top_ids[:count], logprobs.top_logprobs[:count], logprobs.rank)


REQUEST_FAULTS = {RequestError.code, UnsupportedError.code}
"""Codes of an engine for what only shows while a request runs, and is its own doing."""


def _failure(output: TokenOutput) -> DeadlineError | RequestError | RequestFailedError:
    if output.error_code == DeadlineError.code:
        return DeadlineError("The request's deadline passed before it finished.")
    message = output.error or "The engine ended the request."
    if output.error_code in REQUEST_FAULTS:
        return RequestError(message, code=output.error_code)
    error = RequestFailedError(message)
    if output.error_code is not None:
        error.code = output.error_code
    return error


def merged(runs: Sequence[ChoiceRun], clock: RequestClock) -> AsyncGenerator[Piece, None]:
    """Return the pieces of all choices as they come. The first failure ends all of them and is raised."""
    return runs[0].pieces(clock) if len(runs) == 1 else _merged(runs, clock)


async def _merged(runs: Sequence[ChoiceRun], clock: RequestClock) -> AsyncGenerator[Piece, None]:
    queue: asyncio.Queue[Piece | Exception] = asyncio.Queue(MERGE_QUEUE_PIECES)
    pumps = [asyncio.create_task(_pump(run.pieces(clock), queue)) for run in runs]
    try:
        unfinished = len(runs)
        while unfinished:
            match await queue.get():
                case Exception() as error:
                    raise error
                case piece:
                    unfinished -= piece.finish_reason is not None
                    yield piece
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.wait(pumps)


async def _pump(pieces: AsyncGenerator[Piece, None], queue: asyncio.Queue[Piece | Exception]) -> None:
    async with aclosing(pieces):
        try:
            async for piece in pieces:
                await queue.put(piece)
        except Exception as error:
            await queue.put(error)


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached: CachedTokens


def usage_of(runs: Sequence[ChoiceRun]) -> Usage:
    """Sum the tokens of a request. A prompt counts once however many choices it has.

    Choices of a prompt share its KV: only the first to run may find it new, so the least cached tells the truth.
    """
    prompts: dict[str | None, tuple[int, CachedTokens]] = {}
    for run in runs:
        group = run.request.group_id
        tokens, cached = prompts.get(group, (len(run.request.prompt_ids), run.cached))
        prompts[group] = (tokens, min(cached, run.cached, key=lambda one: one.total))
    return Usage(
        prompt_tokens=sum(tokens for tokens, _ in prompts.values()),
        completion_tokens=sum(run.completion_tokens for run in runs),
        cached=CachedTokens(
            *(sum(getattr(cached, tier) for _, cached in prompts.values()) for tier in CachedTokens.__struct_fields__)
        ),
    )


def most_tokens(runs: Sequence[ChoiceRun]) -> tuple[int, int]:
    """Return the tokens of a request's prompts, as usage counts them, and those that its choices may have at most."""
    prompts = {run.request.group_id: len(run.request.prompt_ids) for run in runs}
    return sum(prompts.values()), sum(run.request.sampling.max_tokens or 0 for run in runs)


@dataclass(slots=True)
class Answer:
    """One whole choice."""

    index: int
    text: str
    tokens: list[Token] | None
    finish_reason: StopReason | None
    stop_reason: str | int | None = None
    ids: list[int] | None = None


def _extended(whole: list[T] | None, part: list[T]) -> list[T]:
    """In place: a new list for every token would take as long as all of them together."""
    if whole is None:
        return list(part)
    whole += part
    return whole


async def collect(pieces: AsyncIterator[Piece], choices: int) -> list[Answer]:
    """Join the pieces of each choice."""
    texts: list[list[str]] = [[] for _ in range(choices)]
    answers = [Answer(index, "", None, None) for index in range(choices)]
    async for piece in pieces:
        answer = answers[piece.index]
        texts[piece.index].append(piece.text)
        answer.finish_reason = piece.finish_reason
        answer.stop_reason = piece.stop_reason
        if piece.tokens is not None:
            answer.tokens = _extended(answer.tokens, piece.tokens)
        if piece.ids is not None:
            answer.ids = _extended(answer.ids, piece.ids)
    for answer, parts in zip(answers, texts, strict=True):
        answer.text = "".join(parts)
    return answers
