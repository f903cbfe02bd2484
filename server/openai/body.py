"""From the bytes of a request to a checked body. Bounds what is read and parsed; says where JSON is broken."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import pydantic_core
from pydantic import ValidationError
from starlette.types import Receive, Scope

from engine.errors import RequestError
from server.errors import BodyTooLargeError, ClientGoneError, error_from_validation
from server.openai.fields import GenerationBody, without_nulls

B = TypeVar("B", bound=GenerationBody)

PARSE_IN_THREAD_BYTES = 64 * 1024
"""Larger bodies take long enough to parse that other streams would feel it."""
MAX_MEMBERS = 200_000
"""Objects, lists and members of objects in a body. Text and token ids are cheap by the megabyte, structure is not: what
16 MB of empty objects turn into would keep every stream of the process waiting for a minute."""
MAX_STRINGS = 2 * MAX_MEMBERS
DISCARD_FACTOR = 4
"""How much of a too large body is read and dropped, in limits, so that its sender gets to read the answer."""


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """Return the body, at most `limit_bytes` long, however it is framed. Raises ClientGoneError when it breaks off."""
    _check_content_headers(scope)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("The client closed its connection inside the body.")
        part = message.get("body", b"")
        size += len(part)
        if size <= limit_bytes:
            parts.append(part)
        else:
            parts.clear()
        more = message.get("more_body", False)
        if size > limit_bytes and (not more or size > limit_bytes * DISCARD_FACTOR):
            raise BodyTooLargeError(limit_bytes)
        if not more:
            return b"".join(parts)


def _check_content_headers(scope: Scope) -> None:
    for name, value in scope["headers"]:
        if name == b"content-type":
            _check_content_type(value)
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise RequestError(
                f"The content encoding '{_shown(value)}' is not supported: send the body as it is.",
                code="unsupported_content_encoding",
            )


def _check_content_type(value: bytes) -> None:
    """JSON or no type at all. Forms and plain text are what other sites' pages can make a browser send."""
    kind = value.split(b";")[0].strip().lower()
    if kind not in (b"", b"application/json") and not kind.endswith(b"+json"):
        raise RequestError(
            f"The content type '{_shown(kind)}' is not supported: send 'Content-Type: application/json'.",
            code="unsupported_content_type",
        )


def _shown(header: bytes) -> str:
    return header[:80].decode("latin-1")


async def parse_body(body: bytes, model: type[B]) -> B:
    """Parse and check a body; a large one in a thread. Raises RequestError."""
    if len(body) > PARSE_IN_THREAD_BYTES:  # a smaller one has no room for too many members
        return await asyncio.to_thread(_parse_large, body, model)
    return _parse(body, model)


def _parse_large(body: bytes, model: type[B]) -> B:
    _check_structure(body)
    return _parse(body, model)


def _check_structure(body: bytes) -> None:
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
