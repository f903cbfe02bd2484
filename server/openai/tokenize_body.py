"""The bodies of /tokenize (two forms) and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from server.openai.chat_body import Messages
from server.openai.fields import Truncation, Whole

MAX_TOKENS = 2**20
MAX_TOOLS = 128

Tools = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)]


class TextBody(BaseModel):
    """What the bodies share. Without `model` the served one is meant."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None


class TokenizeBody(TextBody):
    """`prompt`, or `messages` as the chat template writes them. `add_special_tokens` is on for the first only, because
    templates write the special tokens themselves.
    """

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]
    tools: Tools = []
    truncate_prompt_tokens: Truncation = None

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if self.prompt is not None and self.messages is not None:
            raise PydanticCustomError("form_value", "'prompt' and 'messages' exclude each other")
        return self


class DetokenizeBody(TextBody):
    tokens: Annotated[list[Annotated[Whole, Field(ge=0, lt=2**32)]], Field(max_length=MAX_TOKENS, fail_fast=True)]
