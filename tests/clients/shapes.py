"""What the clients' tests ask for."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

QUESTION = "What is the capital of France?"


class City(BaseModel):
    """Of every member only a few texts are possible, so that any model ends it within some 20 tokens."""

    model_config = ConfigDict(extra="forbid")

    country: Literal["France", "Spain"]
    rank: int = Field(ge=1, le=9)
