"""Strict types of request fields, and what chat and text completions have in common.

Strict means: "2" is not a number, 1 is not a flag, true is not an integer; 2.0 is an integer, since JSON has one kind
of number. JSON null is dropped before validation, so it always means absent. Undeclared fields are kept as extras, for
server/openai/extras.py to judge. Only the shape is checked here; what depends on the model, the engine's door checks.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from engine.errors import RequestError
from engine.validation import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_ALLOWED_TOKENS = 2**20
INT64 = 2**63

# Made anew by a call: pydantic would make a deep copy of a default that can be changed, which takes ten times as long.
NO_LIST: Any = Field(default_factory=list, json_schema_extra={"default": []})
NO_OBJECT: Any = Field(default_factory=dict, json_schema_extra={"default": {}})


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


def _logit_bias(value: object) -> dict[int, float]:
    """{"token id": number}: the names of JSON's members are strings."""
    if not isinstance(value, dict):
        raise PydanticCustomError("bias_type", "an object of numbers by token id is needed")
    if len(value) > MAX_LOGIT_BIAS:
        raise PydanticCustomError("bias_length", f"at most {MAX_LOGIT_BIAS} entries are allowed")
    if not all(name.isascii() and name.isdigit() and len(name) <= 10 for name in value):
        raise PydanticCustomError("bias_value", "each name must be a token id")
    for bias in value.values():
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise PydanticCustomError("bias_type", "each value must be a number")
        if not -100 <= bias <= 100:
            raise PydanticCustomError("bias_value", "each value must be in [-100, 100]")
    return {int(name): float(bias) for name, bias in value.items()}


def _bad_words(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise PydanticCustomError("words_type", "a list of strings is needed")
    if len(value) > MAX_BAD_WORDS:
        raise PydanticCustomError("words_length", f"at most {MAX_BAD_WORDS} strings are allowed")
    if any(not word.strip() or len(word) > MAX_BAD_WORD_CHARACTERS for word in value):
        raise PydanticCustomError(
            "words_value", f"each string needs 1 to {MAX_BAD_WORD_CHARACTERS} characters, not all of them spaces"
        )
    return value


def _allowed_tokens(value: object) -> list[int]:
    """One pass at C speed: it may be most of a vocabulary."""
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        raise PydanticCustomError("tokens_type", "a list of token ids is needed")
    if not 0 < len(value) <= MAX_ALLOWED_TOKENS:
        raise PydanticCustomError("tokens_length", f"1 to {MAX_ALLOWED_TOKENS} token ids are needed")
    if min(value) < 0 or max(value) >= 2**32:
        raise PydanticCustomError("tokens_value", "token ids are not negative and have 32 bits")
    return value


def _not_zero(value: int) -> int:
    if value == 0:
        raise PydanticCustomError("keep_value", "a prompt has at least one token; -1 keeps what the model can take")
    return value


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
Truncation = Annotated[Whole, Field(ge=-1, lt=INT64), AfterValidator(_not_zero)] | None
TokenId = Annotated[Whole, Field(ge=0, lt=2**32)]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
]
BadWords = Annotated[
    list[str],
    PlainValidator(_bad_words),
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_CHARACTERS, "pattern": r"\S"},
            "maxItems": MAX_BAD_WORDS,
        }
    ),
]
AllowedTokens = Annotated[
    list[TokenId] | None,
    PlainValidator(_allowed_tokens),
    WithJsonSchema(
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": MAX_ALLOWED_TOKENS}
    ),
]

Schema = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})]
"""A JSON schema or its text: a union would name its branches in error messages, so constraints.py looks at it."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
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
    stop: Stop = NO_LIST
    stop_token_ids: Annotated[
        list[Annotated[Whole, Field(ge=0, lt=2**32)]], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)
    ] = NO_LIST
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=10)] | None = None
    logit_bias: LogitBias = NO_OBJECT
    bad_words: BadWords = NO_LIST
    allowed_token_ids: AllowedTokens = None
    prompt_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Schema = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    truncate_prompt_tokens: Truncation = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Annotated[Whole, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    kv_store: Annotated[bool, Field(strict=True)] = True

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.include_usage and self.stream_options.continuous_usage_stats

    def check_streaming(self) -> None:
        """Check what goes with `stream` and what does not."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' needs 'stream': true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("'prompt_logprobs' is not available with 'stream': true.", param="prompt_logprobs")


def without_nulls(body: Any) -> Any:  # noqa: ANN401  (parsed JSON)
    """Return the body without null members, its own and those of its direct members: null means absent. A JSON schema
    stays as it is: there it may be a value."""
    if not isinstance(body, dict):
        return body
    return {
        name: value if name == "guided_json" else _drop_nulls(value)
        for name, value in body.items()
        if value is not None
    }


def _drop_nulls(value: Any) -> Any:  # noqa: ANN401  (parsed JSON)
    if not isinstance(value, dict):
        return value
    return {name: member for name, member in value.items() if member is not None}
