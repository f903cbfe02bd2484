"""One generating request over ASGI: body in, work raced against the client's patience, JSON or events out.

Everything that can fail at the door (shape, template, length, the engine's admission) fails before the status line,
because the stream opens with its first piece; a silent engine opens it with a keep-alive comment instead. A stream ends
with [DONE] or with an error event, never with both or neither. Knows nothing of what chat and completions differ in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from time import perf_counter, time
from typing import Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from engine.errors import DeadlineError, PressureError
from server.access.record import Caller, RequestRecord, record_of
from server.debug_header import note_decisions
from server.errors import ClientGoneError, UnknownParamsError
from server.openai.channel import Channel
from server.openai.generation import (
    Answer,
    ChoiceRun,
    Piece,
    RequestClock,
    Usage,
    collect,
    merged,
    most_tokens,
    usage_of,
)
from server.openai.relay_body import read_relay_body
from server.openai.relayed import relay, relayed_model
from server.openai.sse import DONE, Envelope
from server.request_body import Body
from server.service import Service
from server.traffic import draining_error

T = TypeVar("T")

ENTRIES_ON_LOOP = 500
"""Tokens with logprobs in one answer. Each takes up to 20 us to write: more of them would keep other streams back."""


class Format(Protocol):
    """How one route writes its answer."""

    def opening(self, index: int) -> bytes: ...

    def piece(self, piece: Piece) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...

    def with_usage(self, chunk: bytes, usage: Usage) -> bytes: ...

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes: ...


@dataclass(frozen=True)
class Prepared:
    """A checked request, ready to run."""

    runs: list[ChoiceRun]
    envelope: Envelope
    format: Format
    stream: bool
    include_usage: bool
    ignored: list[str]
    continuous_usage: bool = False


Prepare = Callable[[Service, bytes, Caller], Awaitable[Prepared]]


class GenerateEndpoint:
    """The ASGI application of one generating route. `prepare` turns a body into choices and a format, or raises."""

    def __init__(self, service: Service, prepare: Prepare) -> None:
        self.service = service
        self.prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        clock = RequestClock(self.service.metrics)
        caller = self.service.caller(record)

        async def answer(body: Body, channel: Channel) -> None:
            data = body.take()
            if (relayed := relayed_model(self.service, data)) is not None:
                asked = await prepared_in_turn(self.service, caller, partial(read_relay_body, data))
                del data
                body.release()
                await relay(self.service, relayed, scope["path"], asked, caller, record, channel, clock)
                return
            prepared = await prepared_in_turn(self.service, caller, partial(self.prepare, self.service, data, caller))
            del data
            body.release()
            envelope = prepared.envelope
            record.answer_id, record.model, record.stream = envelope.id, envelope.model, prepared.stream
            note_ignored(self.service, prepared.ignored, channel)
            note_decisions(self.service, prepared.runs[0].request.request_id, channel)
            if record.quota is not None:
                record.quota.hold(*most_tokens(prepared.runs))
            has_run = True
            try:
                await (self._stream if prepared.stream else self._whole)(prepared, channel, clock)
            except PressureError:
                has_run = any(run.completion_tokens for run in prepared.runs)
                raise
            finally:
                self._account(prepared.runs, clock, record, has_run=has_run)

        await answer_request(self.service, scope, receive, send, answer)

    async def _whole(self, prepared: Prepared, channel: Channel, clock: RequestClock) -> None:
        async with aclosing(merged(prepared.runs, clock)) as pieces:
            answers = await collect(pieces, len(prepared.runs))
        write = partial(prepared.format.whole, answers, usage_of(prepared.runs))
        entries = sum(len(answer.tokens or ()) for answer in answers)
        entries += sum(len(run.prompt_logprobs or ()) for run in prepared.runs)
        await channel.send_json(200, await asyncio.to_thread(write) if entries > ENTRIES_ON_LOOP else write())

    async def _stream(self, prepared: Prepared, channel: Channel, clock: RequestClock) -> None:
        text = prepared.format
        keep_alive = channel.keep_alive(self.service.config.sse_keep_alive_s)
        try:
            last, unfinished = b"", len(prepared.runs)
            async with aclosing(merged(prepared.runs, clock)) as pieces:
                openings = [opening for run in prepared.runs if (opening := text.opening(run.index))]
                async for piece in pieces:
                    chunk = text.piece(piece)
                    if prepared.continuous_usage:
                        so_far = usage_of(prepared.runs)
                        chunk = text.with_usage(chunk, so_far)
                        openings = [text.with_usage(opening, so_far) for opening in openings]
                    if openings:
                        chunk = b"".join([*openings, chunk])
                        openings = []
                    unfinished -= piece.finish_reason is not None
                    if not unfinished:
                        last = chunk  # nothing comes behind it but the end: one write less
                        continue
                    await channel.write(chunk)
            usage = text.usage(usage_of(prepared.runs)) if prepared.include_usage else b""
            await channel.end(last + usage + DONE)
        finally:
            keep_alive.cancel()

    def _account(self, runs: Sequence[ChoiceRun], clock: RequestClock, record: RequestRecord, *, has_run: bool) -> None:
        metrics, usage = self.service.metrics, usage_of(runs)
        if record.quota is not None:
            # One that found no room has used nothing. One whose client left may have, and pays for its prompt.
            record.quota.spend(usage.prompt_tokens + usage.completion_tokens if has_run else 0)
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.count_cached(usage.cached)
        metrics.generation_tokens.inc(usage.completion_tokens)
        metrics.e2e.observe(perf_counter() - clock.arrived_s)
        record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        record.cached_tokens, record.ttft_s = usage.cached.total, clock.ttft_s
        record.finish_reasons = [run.finish_reason for run in runs]


Answering = Callable[[Body, Channel], Awaitable[None]]


async def answer_request(
    service: Service, scope: Scope, receive: Receive, send: Send, answer: Answering, *, needs_model: bool = True
) -> None:
    """Read a body and run `answer` on it as a task of the service's traffic, for as long as the client is there."""
    channel, body = Channel(send, record_of(scope)), Body(service.body_memory)
    try:
        if needs_model:
            service.check_open()
        await body.read(scope, receive)
        work = service.traffic.start(_answer_or_tell(service, answer, body, channel))
        await _while_connected(receive, work, service.parting)
    except ClientGoneError as error:
        channel.record.error = error.code
        service.metrics.client_disconnects.inc()
    except Exception as error:
        await channel.fail(error)
    finally:
        body.release()


async def _answer_or_tell(service: Service, answer: Answering, body: Body, channel: Channel) -> None:
    """Answer in full. Cancelled by the client's leaving, or by the end of a drain, which the client is told of."""
    try:
        await answer(body, channel)
    except asyncio.CancelledError:
        if not service.traffic.cut_off_current():
            raise
        await channel.fail(draining_error())
    except Exception as error:
        await channel.fail(error)


async def prepared_in_turn(service: Service, caller: Caller, prepare: Callable[[], Awaitable[T]]) -> T:
    """Do what comes before the engine has the request, which from then on minds the deadline itself."""
    if caller.deadline_unix_s is None:
        async with service.preparing:
            return await prepare()
    deadline = asyncio.timeout(max(0.0, caller.deadline_unix_s - time()))
    try:
        async with deadline, service.preparing:
            return await prepare()
    except TimeoutError:
        if not deadline.expired():
            raise
        raise DeadlineError("The request's deadline passed before it began to run.") from None


def note_ignored(service: Service, ignored: Sequence[str], channel: Channel) -> None:
    """Name the unknown fields in a header, or refuse them where the server is strict."""
    if not ignored:
        return
    if service.config.strict_params:
        raise UnknownParamsError(ignored)
    service.metrics.ignored_params.inc(len(ignored))
    channel.add_header(b"x-ignored-params", ", ".join(ignored))


async def _while_connected(receive: Receive, work: asyncio.Task[None], parting: asyncio.Semaphore) -> None:
    """Wait for `work`; when the client leaves first, cancel it in its turn, wait until it has let go, and say so."""
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            async with parting:
                work.cancel()
                await asyncio.wait((work,))
            raise ClientGoneError("The client closed its connection.")
        work.result()
    finally:
        gone.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait((work,))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
