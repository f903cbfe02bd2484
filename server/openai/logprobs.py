"""The two shapes of token logprobs. JSON has no infinities, so log 0 is told as -9999, as other servers do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from server.openai.generation import Token

LOG_ZERO = -9999.0

Json = dict[str, object]


class TokenNames(Protocol):
    """What logprobs need of a codec."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int, *, show_special: bool = False) -> bytes: ...


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOG_ZERO


def chat_logprobs(tokens: Sequence[Token], names: TokenNames) -> Json:
    """{content: [{token, logprob, bytes, top_logprobs}], refusal}"""
    content = [
        _chat_token(token.id, token.logprobs.logprob, names)
        | {"top_logprobs": [_chat_token(top, value, names) for top, value in _alternatives(token)]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _alternatives(token: Token) -> zip[tuple[int, float]]:
    return zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)


def _chat_token(token_id: int, logprob: float, names: TokenNames) -> Json:
    data = list(names.token_bytes(token_id, show_special=True))
    return {"token": names.token_text(token_id), "logprob": finite(logprob), "bytes": data}


def completion_logprobs(tokens: Sequence[Token], names: TokenNames) -> Json:
    """{tokens, token_logprobs, top_logprobs, text_offset}, four lists of one length."""
    return {
        "tokens": [names.token_text(token.id) for token in tokens],
        "token_logprobs": [finite(token.logprobs.logprob) for token in tokens],
        "top_logprobs": [_top_by_text(token, names) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _top_by_text(token: Token, names: TokenNames) -> Json | None:
    """The best alternatives by text, and the chosen token in any case. Of two with one text the better stays."""
    top: Json = {}
    for token_id, value in _alternatives(token):
        top.setdefault(names.token_text(token_id), finite(value))
    if top:
        top.setdefault(names.token_text(token.id), finite(token.logprobs.logprob))
    return top or None
