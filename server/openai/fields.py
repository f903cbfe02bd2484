"""Strict types of request fields, and what chat and text completions have in common.

Strict means: "2" is not a number, 1 is not a flag, true is not an integer; 2.0 is an integer, since JSON has one kind
of number. JSON null is dropped before validation, so it always means absent. Undeclared fields are kept as extras, for
server/openai/extras.py to judge. Only the shape is checked here; what depends on the model, the engine's door checks.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from engine.errors import RequestError
from engine.validation import MAX_STOP_TOKEN_IDS

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
INT64 = 2**63


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _stop(value: object) -> list[str]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise PydanticCustomError("stop_type", "a string or a list of strings is needed")
    if len(strings) > MAX_STOP_STRINGS:
        raise PydanticCustomError("stop_length", f"at most {MAX_STOP_STRINGS} strings are allowed")
    if any(not text or len(text) > MAX_STOP_CHARACTERS for text in strings):
        raise PydanticCustomError("stop_value", f"each string needs 1 to {MAX_STOP_CHARACTERS} characters")
    return strings


Whole = Annotated[int, BeforeValidator(_whole), Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Stop = Annotated[
    list[str],
    PlainValidator(_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOP_STRINGS},
            ]
        }
    ),
]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationBody(BaseModel):
    """The fields that /v1/chat/completions and /v1/completions share. None means: the model's own default."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[Whole, Field(ge=-INT64, le=INT64 - 1)] | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Annotated[Whole, Field(ge=1, lt=INT64)] | None = None
    min_tokens: Annotated[Whole, Field(ge=0, lt=INT64)] = 0
    stop: Stop = []
    stop_token_ids: Annotated[
        list[Annotated[Whole, Field(ge=0, lt=2**32)]], Field(max_length=MAX_STOP_TOKEN_IDS), FailFast()
    ] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Annotated[Whole, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' needs 'stream': true.", param="stream_options")


def without_nulls(body: Any) -> Any:  # noqa: ANN401  (parsed JSON)
    """Return the body without null members, its own and those of its direct members: null means absent."""
    if not isinstance(body, dict):
        return body
    return {name: _drop_nulls(value) for name, value in body.items() if value is not None}


def _drop_nulls(value: Any) -> Any:  # noqa: ANN401  (parsed JSON)
    if not isinstance(value, dict):
        return value
    return {name: member for name, member in value.items() if member is not None}
