"""The outputs of one request at another server: from its stream, and where that leaves tokens out from whole answers to
what is left of the request, one part after the other.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

import msgspec

from engine.errors import EngineDiedError, RequestFailedError, UnsupportedError
from engine.protocol import GenerateRequest, TokenOutput
from server.foreign.dialect import Dialect, PartDialect, check_common
from server.foreign.exchange import Exchange
from server.foreign.stream import Stream

if TYPE_CHECKING:
    import aiohttp

PART_TOKENS = 16
"""Tokens that are asked for at once where a server's streams do not tell all of them: few enough to be read as they
come, and enough that asking costs little."""

MAX_PART_BYTES = 4 * 1024 * 1024
"""Of such an answer, as of one event of a stream."""


async def outputs_of(
    exchange: Exchange, session: aiohttp.ClientSession, url: str, stream: Stream, dialect: Dialect
) -> AsyncGenerator[TokenOutput, None]:
    """Yield what the server at `url` makes, to the end. Raises what `Exchange` raises, the error that the server tells,
    EngineDiedError for an answer that breaks off or cannot be read, and RequestFailedError for tokens that cannot be
    had."""
    headers = {"X-Request-Id": stream.request.request_id[:128]}
    body = msgspec.json.encode(dialect.body(stream.request, stream.info))
    await exchange.post(session, url + dialect.path, body, headers)
    async with aclosing(_streamed(exchange, stream)) as outputs:
        async for output in outputs:
            yield output
            if output.finish_reason is not None:
                return
    parts = cast(PartDialect, dialect)
    while True:
        exchange.close()
        rest, begin = _resumable(stream), stream.offset
        body = msgspec.json.encode(parts.part_body(rest, stream.info, PART_TOKENS))
        await exchange.post(session, url + dialect.path, body, headers)
        for output in stream.take_part(parts.read_part(await _whole(exchange), rest, stream.info)):
            yield output
            if output.finish_reason is not None:
                return
        if stream.offset == begin:  # it would be asked the same again and again
            raise EngineDiedError("The engine's answer to what is left of the request is empty.")


async def _streamed(exchange: Exchange, stream: Stream) -> AsyncGenerator[TokenOutput, None]:
    """Yield up to the end, or up to the first token that is missing."""
    while not stream.has_gap:
        try:
            data = await exchange.read()
        except EngineDiedError:
            data = None
        if data is None:
            if (last := stream.at_end()) is None:
                raise EngineDiedError("The engine's answer broke off.")
            yield last
            return
        for output in stream.outputs(data):
            yield output
        if stream.failure is not None:
            raise stream.failure


async def _whole(exchange: Exchange) -> bytes:
    answer = bytearray()
    while (data := await exchange.read()) is not None:
        answer += data
        if len(answer) > MAX_PART_BYTES:
            raise EngineDiedError(f"The engine's answer is larger than {MAX_PART_BYTES} bytes.")
    return bytes(answer)


def _resumable(stream: Stream) -> GenerateRequest:
    """Return what is left of a request. Raises RequestFailedError where that cannot be asked for by itself."""
    rest = stream.rest
    try:
        check_common(rest)
    except UnsupportedError as error:
        raise RequestFailedError(
            f"The engine left out tokens, and with '{error.param}' it cannot be asked again."
        ) from None
    if rest.sampling.logprobs is not None:
        raise RequestFailedError("The engine left out tokens, whose logprobs it does not tell.")
    return rest
