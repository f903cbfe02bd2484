"""The two shapes of token logprobs. JSON has no infinities, so log 0 is told as -9999, as other servers do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from engine.protocol import TokenLogprobs
from server.openai.generation import ChoiceRun, Token, cut

LOG_ZERO = -9999.0

Json = dict[str, object]


class TokenNames(Protocol):
    """What logprobs need of a codec."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int, *, show_special: bool = False) -> bytes: ...


class IdNames:
    """Names tokens by their ids, for clients that tell apart tokens of equal text (`return_tokens_as_token_ids`)."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    def token_bytes(self, token_id: int, *, show_special: bool = False) -> bytes:
        return self._names.token_bytes(token_id, show_special=show_special)


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOG_ZERO


def chat_logprobs(tokens: Sequence[Token], names: TokenNames) -> Json:
    """{content: [{token, logprob, bytes, top_logprobs}], refusal}"""
    content = [
        _chat_token(token.id, logprobs.logprob, names)
        | {"top_logprobs": [_chat_token(top, value, names) for top, value in _alternatives(logprobs)]}
        for token in tokens
        if (logprobs := token.logprobs) is not None
    ]
    return {"content": content, "refusal": None}


def _alternatives(logprobs: TokenLogprobs) -> zip[tuple[int, float]]:
    return zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)


def _chat_token(token_id: int, logprob: float, names: TokenNames) -> Json:
    data = list(names.token_bytes(token_id, show_special=True))
    return {"token": names.token_text(token_id), "logprob": finite(logprob), "bytes": data}


def completion_logprobs(tokens: Sequence[Token], names: TokenNames) -> Json:
    """{tokens, token_logprobs, top_logprobs, text_offset}, four lists of one length; null where a token has none."""
    return {
        "tokens": [names.token_text(token.id) for token in tokens],
        "token_logprobs": [None if token.logprobs is None else finite(token.logprobs.logprob) for token in tokens],
        "top_logprobs": [_top_by_text(token, names) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _top_by_text(token: Token, names: TokenNames) -> Json | None:
    """The best alternatives by text, and the chosen token in any case. Of two with one text the better stays."""
    top: Json = {}
    if token.logprobs is None:
        return None
    for token_id, value in _alternatives(token.logprobs):
        top.setdefault(names.token_text(token_id), finite(value))
    if top:
        top.setdefault(names.token_text(token.id), finite(token.logprobs.logprob))
    return top or None


def prompt_logprobs(run: ChoiceRun, count: int, names: TokenNames) -> list[Json | None]:
    """[null, {"token id": {logprob, rank, decoded_token}}, ...]: of each prompt token its own and its alternatives."""
    entries = zip(run.request.prompt_ids, run.prompt_logprobs or (), strict=True)
    return [_by_id(token, cut(own, count), names) for token, own in entries]


def _by_id(token_id: int, logprobs: TokenLogprobs | None, names: TokenNames) -> Json | None:
    if logprobs is None:
        return None
    entries = {str(token_id): _prompt_token(token_id, logprobs.logprob, logprobs.rank, names)}
    for rank, (top, value) in enumerate(_alternatives(logprobs), start=1):
        entries[str(top)] = _prompt_token(top, value, rank, names)
    return {**entries}


def _prompt_token(token_id: int, logprob: float, rank: int | None, names: TokenNames) -> Json:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": names.token_text(token_id)}
