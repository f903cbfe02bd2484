"""The body of POST /v1/completions and the four forms of its prompt."""

from __future__ import annotations

from array import array
from typing import Annotated

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from engine.validation import MAX_LOGPROBS
from server.openai.fields import INT64, GenerationBody, Whole

MAX_PROMPTS = 65536
"""More than the setting allows. It bounds what is looked at."""
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this route."""

Prompt = str | list[int]


def _prompts(value: object) -> list[Prompt]:
    """str, [str], [int] or [[int]] -> a list of prompts. One pass that stops at the first fault."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError(
            "prompt_type", "a string, or a list of strings, token ids or lists of token ids, not empty"
        )
    if _is_whole(value[0]):
        return [_token_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise PydanticCustomError("prompt_length", f"at most {MAX_PROMPTS} prompts are allowed")
    if all(isinstance(prompt, str) for prompt in value):
        return list(value)
    return [_token_ids(prompt) for prompt in value]


def _token_ids(value: object) -> list[int]:
    if isinstance(value, list) and value:
        if set(map(type, value)) == {int} and _has_32_bits(value):
            return value  # the usual case, at C speed: there may be millions
        if all(_is_whole(token) for token in value):
            return [int(token) for token in value]
    raise PydanticCustomError("prompt_type", "lists of token ids hold non-negative integers only and are not empty")


def _has_32_bits(values: list[int]) -> bool:
    try:
        array("I", values)
    except OverflowError:
        return False
    return True


def _is_whole(value: object) -> bool:
    if isinstance(value, float):
        return value.is_integer() and 0 <= value < 2**32
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32


Prompts = Annotated[
    list[Prompt],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


class CompletionBody(GenerationBody):
    prompt: Prompts
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    max_tokens: Annotated[Whole, Field(ge=0, lt=INT64)] | None = None
    add_special_tokens: bool = True
    echo: bool = False

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """What the engine is asked for: an echoed prompt has logprobs where the output has."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)

    @property
    def token_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
