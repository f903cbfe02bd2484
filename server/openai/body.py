"""From the bytes of a request to a checked body. Bounds what is parsed; says where JSON is broken."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from engine.errors import RequestError
from server.errors import error_from_validation
from server.openai.fields import without_nulls

B = TypeVar("B", bound=BaseModel)

PARSE_IN_THREAD_BYTES = 64 * 1024
"""Larger bodies take long enough to parse that other streams would feel it."""
MAX_MEMBERS = 200_000
"""Objects, lists and members of objects in a body. Text and token ids are cheap by the megabyte, structure is not: what
16 MB of empty objects turn into would keep every stream of the process waiting for a minute."""
MAX_STRINGS = 2 * MAX_MEMBERS


async def parse_body(body: bytes, model: type[B]) -> B:
    """Parse and check a body; a large one in a thread. Raises RequestError."""
    if len(body) > PARSE_IN_THREAD_BYTES:  # a smaller one has no room for too many members
        return await asyncio.to_thread(_parse_large, body, model)
    return _parse(body, model)


def _parse_large(body: bytes, model: type[B]) -> B:
    check_structure(body)
    return _parse(body, model)


def check_structure(body: bytes) -> None:
    """Count what a body would turn into before it does. Takes milliseconds, on a few passes at the speed of memory."""
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NO_STRUCTURE)
    strings = bare.count(b'"') // 2
    outside = len(b"".join(bare.split(b'"')[::2])) if strings <= MAX_STRINGS else 0
    if strings > MAX_STRINGS or outside > MAX_MEMBERS:
        raise RequestError(
            f"The request body has more than {MAX_MEMBERS} members, or {MAX_STRINGS} strings.", code="request_too_large"
        )


_NO_STRUCTURE = bytes(set(range(256)) - set(b'"[{:'))


def _parse(body: bytes, model: type[B]) -> B:
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    try:
        return model.model_validate(without_nulls(value))
    except ValidationError as error:
        raise error_from_validation(error) from None
