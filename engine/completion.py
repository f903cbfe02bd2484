"""One offline prompt's way from the engine's outputs to a Completion. Knows no core and no batch."""

from __future__ import annotations

import msgspec

from engine.protocol import CachedTokens, FinishReason, GenerateRequest, TokenLogprobs, TokenOutput
from engine.text.machine import TextMachine


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. `cached_tokens` are those of the prompt whose KV was there already, `cached` tells where."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    cached: CachedTokens = CachedTokens()


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one prompt.

    `token_ids` has every output token, the end token included, which `text` does not show; text in front of a stop
    string ends in the middle of a token where the string begins there. `stop_reason` is the stop string or the entry
    of stop_token_ids that ended it, None for the model's own end. `logprobs` has one entry per output token when they
    were asked for. A request that failed inside the engine has finish_reason "error", and `error` says why.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    usage: Usage
    error: str | None = None


class CompletionRun:
    """One prompt on its way to a Completion: takes the engine's outputs and makes text of them."""

    def __init__(self, request: GenerateRequest, machine: TextMachine) -> None:
        self.request = request
        self._machine = machine
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._cached = CachedTokens()
        self._reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._error: str | None = None

    def take(self, output: TokenOutput) -> int | None:
        """Take an output. When it completes a stop string that the engine does not know of, return how many output
        tokens count: the caller ends the request with that."""
        if output.cached is not None:
            self._cached = output.cached
        if self._reason is not None:  # Overshoot behind a stop string.
            return None
        self._ids += output.token_ids
        self._logprobs += output.logprobs or ()
        delta = self._machine.push(output.token_ids, stop_token=output.stop_token)
        self._texts.append(delta.text)
        if output.finish_reason is not None and delta.stop is None:
            delta = self._machine.end(output.finish_reason)
            self._texts.append(delta.text)
        if delta.stop is not None:
            self._reason, self._stop_reason = "stop", delta.stop.string
            del self._ids[delta.stop.keep_tokens :], self._logprobs[delta.stop.keep_tokens :]
            return delta.stop.keep_tokens if output.finish_reason is None else None
        self._reason, self._error = output.finish_reason, output.error
        if output.stop_token in self.request.sampling.stop_token_ids:
            self._stop_reason = output.stop_token
        return None

    def completion(self) -> Completion:
        assert self._reason is not None, "asked for a completion before its end"
        return Completion(
            text="".join(self._texts),
            token_ids=tuple(self._ids),
            finish_reason=self._reason,
            stop_reason=self._stop_reason,
            logprobs=None if self.request.sampling.logprobs is None else tuple(self._logprobs),
            usage=Usage(
                prompt_tokens=len(self.request.prompt_ids),
                completion_tokens=len(self._ids),
                cached_tokens=self._cached.total,
                cached=self._cached,
            ),
            error=self._error,
        )
