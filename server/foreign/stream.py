"""One running request at another server as token ids: events put together to outputs. Knows no connections."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.errors import EngineDiedError, HeadraceError
from engine.protocol import CachedTokens, EngineInfo, GenerateRequest, TokenLogprobs, TokenOutput
from server.bench.serve_stream import EventLines
from server.foreign.dialect import EventReader, Piece, SkippedTokensError


class Stream:
    """`offset` is the index of the next output token. `failure` is set when events told an error behind what they
    added, `has_gap` when tokens are missing behind them."""

    def __init__(self, request: GenerateRequest, info: EngineInfo, reader: EventReader) -> None:
        self.request = request
        self.info = info
        self.offset = len(request.resume_ids)
        self.failure: HeadraceError | None = None
        self.has_gap = False
        self._reader = reader
        self._ends = frozenset(() if request.sampling.ignore_eos else info.eos_ids) | set(
            request.sampling.stop_token_ids
        )
        self._lines = EventLines()
        self._emitted: list[int] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._cached: int | None = None
        self._is_first = True
        self._has_told_cached = False
        self._last: TokenOutput | None = None

    def outputs(self, data: bytes) -> list[TokenOutput]:
        """Return what these bytes add, as one output at most."""
        try:
            events = self._lines.feed(data)
        except ValueError as error:
            raise EngineDiedError(f"The engine's answer cannot be read: {error}") from None
        finish: Literal["stop", "length"] | None = None
        try:
            for event in events:
                if self.has_gap:
                    break
                piece = self._reader.read(event)
                if piece is None:
                    continue
                if finish is None and self._last is None:
                    self._take(piece)
                    finish = piece.finish_reason
                elif piece.cached_tokens is not None:
                    self._cached = piece.cached_tokens
        except SkippedTokensError:
            self.has_gap = True
        except HeadraceError as error:
            self.failure = error
        output = self._output(finish) if self._last is None else None
        if output is not None and output.finish_reason is None:
            return [output]
        self._last = self._last or output
        if self._last is None or (self._reader.tells_cached_last and self._cached is None):
            return []
        return [self._whole_last(self._last)]

    def at_end(self) -> TokenOutput | None:
        """The answer is over. Return the terminal output if it still waits for what comes behind it."""
        return self._last and self._whole_last(self._last)

    def _whole_last(self, last: TokenOutput) -> TokenOutput:
        """Return the terminal output with what the engine told of its cache after the first."""
        if self._cached is None or self._has_told_cached:
            return last
        return msgspec.structs.replace(last, cached=CachedTokens(device=self._cached))

    @property
    def rest(self) -> GenerateRequest:
        """The request as what is left of it would be resumed."""
        return msgspec.structs.replace(self.request, resume_ids=[*self.request.resume_ids, *self._emitted])

    def take_part(self, piece: Piece) -> list[TokenOutput]:
        """Return what a whole answer to `rest` adds."""
        self._take(piece)
        output = self._output(piece.finish_reason)
        return [] if output is None else [output]

    def _take(self, piece: Piece) -> None:
        self._ids += piece.token_ids
        self._logprobs += piece.logprobs
        if piece.cached_tokens is not None:
            self._cached = piece.cached_tokens

    def _output(self, finish: Literal["stop", "length"] | None) -> TokenOutput | None:
        """Tokens wait for their logprobs; at the end everything must be there."""
        wants = self.request.sampling.logprobs is not None
        count = min(len(self._ids), len(self._logprobs)) if wants else len(self._ids)
        if finish is not None and count < len(self._ids):
            raise EngineDiedError("The engine told fewer logprobs than tokens.")
        if not count and finish is None:
            return None
        ids, self._ids = self._ids[:count], self._ids[count:]
        logprobs, self._logprobs = self._logprobs[:count], self._logprobs[count:]
        cached = self._cached if self._is_first else None
        self._is_first = False
        self._has_told_cached = self._has_told_cached or cached is not None
        self._emitted += ids
        # Many servers tell the end behind the last token, and it may come by itself.
        last_id = self._emitted[-1] if self._emitted else None
        output = TokenOutput(
            self.request.request_id,
            self.request.attempt,
            self.offset,
            ids,
            finish,
            stop_token=last_id if finish == "stop" and last_id in self._ends else None,
            logprobs=logprobs if wants else None,
            cached=None if cached is None else CachedTokens(device=cached),
        )
        self.offset += count
        return output
