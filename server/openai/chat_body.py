"""The body of POST /v1/chat/completions and its messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from engine.validation import MAX_LOGPROBS
from server.openai.fields import INT64, GenerationBody, Whole

MAX_MESSAGES = 16_384
"""Far more than windows hold: a message costs some tokens even when it is empty."""


def _content(value: object) -> object:
    """The shape only: which parts a model can take, its template knows."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise PydanticCustomError("content_type", "a string or a list of content parts is needed")
    return value


TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Content = Annotated[
    str | list[dict[str, Any]] | None,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}, {"type": "null"}]}),
]


class Message(BaseModel):
    """One turn. What it holds beyond role and content (name, tool_calls, ...) is the template's to use."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("content_value", "content may be null for the assistant's messages only")
        return self

    def for_template(self) -> dict[str, object]:
        """Return the message as templates know it: 'developer' is OpenAI's newer word for 'system'."""
        extras = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        role = "system" if self.role == "developer" else self.role
        return {**extras, "role": role, "content": self.content}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatBody(GenerationBody):
    messages: Messages
    max_completion_tokens: Annotated[Whole, Field(ge=1, lt=INT64)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_logprobs(self) -> int | None:
        """The number of alternatives wanted, None for no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None
