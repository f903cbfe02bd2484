"""What the languages of other engines have in common: a request becomes a body, events become pieces. Knows no HTTP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeVar

import msgspec

from engine.errors import EngineDiedError, EngineError, UnsupportedError
from engine.protocol import EngineInfo, GenerateRequest, TokenLogprobs
from server.foreign.errors import error_of_body


class ToldEvent(Protocol):
    """What every language's event may tell."""

    @property
    def error(self) -> object: ...


Event = TypeVar("Event", bound=ToldEvent)

LOWEST_LOGPROB = -9999.0
"""What servers write for log 0, which JSON has not."""

DONE = b"[DONE]"


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one event adds. `logprobs` may lag behind the ids that they belong to. `cached_tokens` None is unknown."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: Literal["stop", "length"] | None = None
    cached_tokens: int | None = None


class SkippedTokensError(Exception):
    """The stream left out the ids of some tokens: they have to be asked for in another way."""


class EventReader(Protocol):
    """Reads the events of one answer. `tells_cached_last` is for engines that tell how much of the prompt was cached
    in an event behind the last token."""

    tells_cached_last: bool

    def read(self, data: bytes) -> Piece | None:
        """Return what an event's data adds, None for nothing. Raises the error that the event tells, EngineDiedError
        for what is none of this language, and SkippedTokensError before what it could not tell whole."""
        ...


class Dialect(Protocol):
    """One language. Stateless."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str:
        """Where requests are posted, behind the server's base URL."""
        ...

    def check(self, request: GenerateRequest) -> None:
        """Raise UnsupportedError for what this language cannot ask for: nothing is dropped in silence."""
        ...

    def body(self, request: GenerateRequest, info: EngineInfo) -> Mapping[str, object]: ...

    def reader(self, request: GenerateRequest) -> EventReader: ...


class PartDialect(Dialect, Protocol):
    """A language whose streams may leave out ids, which answers that are not streamed have."""

    def part_body(self, request: GenerateRequest, info: EngineInfo, count: int) -> Mapping[str, object]:
        """Return what asks for the next tokens, `count` at most, as one whole answer."""
        ...

    def read_part(self, data: bytes, request: GenerateRequest, info: EngineInfo) -> Piece:
        """Read such an answer to what is left of `request`. It has a finish reason unless there is more to come."""
        ...


def check_common(request: GenerateRequest) -> None:
    """Raise UnsupportedError for what no other engine does, or does not do when a request is resumed on it."""
    sampling = request.sampling
    refused = {
        "prompt_logprobs": request.prompt_logprobs is not None,
        "mode": request.mode != "full" or request.kv_ticket is not None,
        "bad_words": bool(sampling.bad_words),
        "max_tokens": sampling.max_tokens == 0,
    }
    if request.resume_ids:
        # Resumed tokens are prompt to another engine: it would neither count nor match them.
        refused["presence_penalty"] = sampling.presence_penalty != 0
        refused["frequency_penalty"] = sampling.frequency_penalty != 0
        refused["response_format"] = request.grammar is not None
    for param, is_wanted in refused.items():
        if is_wanted:
            raise unsupported(param)


def unsupported(param: str) -> UnsupportedError:
    return UnsupportedError(f"'{param}' is not available from the engine that serves this model.", param=param)


def tokens_left(request: GenerateRequest, info: EngineInfo) -> int:
    """Return how many more tokens may be made: other engines count resumed ones as prompt."""
    room = info.max_model_len - len(request.prompt_ids)
    limit = room if request.sampling.max_tokens is None else min(room, request.sampling.max_tokens)
    return max(1, limit - len(request.resume_ids))


def min_tokens_left(request: GenerateRequest) -> int:
    return max(0, request.sampling.min_tokens - len(request.resume_ids))


def logprob(value: float | None) -> float:
    return -math.inf if value is None or value <= LOWEST_LOGPROB else float(value)


def answer_of(data: bytes, kind: type[Event]) -> Event | None:
    """Return what an event says, None for the one that ends the stream. Raises the error that it tells."""
    return None if data == DONE else read_answer(data, kind, "an event that cannot be read")


def read_answer(data: bytes, kind: type[Event], otherwise: str) -> Event:
    """Return what the engine says. Raises the error that it tells, and EngineDiedError where it is `otherwise`."""
    try:
        answer = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineDiedError(f"The engine sent {otherwise}: {str(error)[:200]}") from None
    if answer.error is not None:
        raise error_of_body(data)
    return answer


def no_ids() -> EngineError:
    """Nothing can be asked for by token ids, whatever the request is."""
    return EngineError("The engine sent text without token ids: it can only be used as a text relay.")
