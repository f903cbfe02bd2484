"""The vocabulary in a GGUF file's metadata, whatever kind of tokenizer it belongs to. Raises ModelError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import cast

from engine.errors import ModelError


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`: what a vocabulary entry is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def strings(metadata: Mapping[str, object], key: str) -> Sequence[str]:
    value = metadata.get(key)
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(item, str) for item in value):
        raise ModelError(f"The GGUF file has no usable {key}.")
    return cast("Sequence[str]", value)


def token_types(metadata: Mapping[str, object], count: int) -> list[int]:
    """A file without types has normal tokens only."""
    value = metadata.get("tokenizer.ggml.token_type")
    if value is None:
        return [TokenType.NORMAL] * count
    if not isinstance(value, Sequence) or len(value) != count or not all(isinstance(kind, int) for kind in value):
        raise ModelError(f"The GGUF file has no usable tokenizer.ggml.token_type for its {count} tokens.")
    return list(value)


ADDED = frozenset({TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED})


def added_token(token_id: int, content: str, kind: int) -> dict[str, object]:
    """Matched in the text before anything else. User-defined ones are text like any other, the rest are special."""
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": kind != TokenType.USER_DEFINED,
    }
