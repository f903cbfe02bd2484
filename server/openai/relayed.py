"""Chat and text completions of models whose engines give text only: the client's request goes on to one of them, and
its answer comes back as it is, under our request id, with our errors, and counted.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from time import perf_counter

import msgspec

from engine.errors import EngineDiedError, HeadraceError
from kvstore.keys import PUBLIC_SCOPE
from server.access.priority import chosen_priority
from server.access.record import Caller, RequestRecord
from server.access.session import session_of_body
from server.bench.serve_stream import EventLines
from server.debug_header import note_decisions
from server.foreign.dialect import DONE as DONE_DATA
from server.foreign.dialect import read_answer
from server.foreign.relay_supervisor import RelayRequest, RelaySupervisor, StreamedAnswer
from server.openai.channel import Channel
from server.openai.generation import RequestClock
from server.openai.relay_body import RelayBody, model_named
from server.openai.sse import DONE
from server.served_model import ServedModel
from server.service import Service

RELAY_HEADER = (b"x-headrace-relay", "text")
CHARACTERS_A_TOKEN = 4


class Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class UsageTold(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct, frozen=True):
    """What is read of a chunk, or of a whole answer."""

    id: str | None = None
    choices: list[Choice] = []
    usage: UsageTold | None = None
    error: object = None


class Account:
    """What an answer is counted as. `prompt_tokens` is an estimate, until the server tells the usage."""

    def __init__(self, record: RequestRecord, prompt_tokens: int) -> None:
        self.is_finished = False
        self.has_begun = False
        self._record = record
        self._prompt_tokens = prompt_tokens
        self._pieces = 0

    def take(self, chunk: Chunk) -> None:
        record = self._record
        self.has_begun = True
        self._pieces += len(chunk.choices)
        record.answer_id = record.answer_id or chunk.id
        reasons = [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        record.finish_reasons += reasons
        self.is_finished = self.is_finished or bool(reasons)
        if chunk.usage is not None:
            record.prompt_tokens, record.completion_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            record.cached_tokens = None if details is None else details.cached_tokens

    def count(self, service: Service, clock: RequestClock, *, has_run: bool) -> None:
        record, metrics = self._record, service.metrics
        if record.quota is not None:
            record.quota.spend(self._spent_tokens() if has_run else 0)
        metrics.prompt_tokens.inc(record.prompt_tokens or 0)
        metrics.cached_prompt_tokens.inc(record.cached_tokens or 0)
        metrics.generation_tokens.inc(record.completion_tokens or 0)
        metrics.e2e.observe(perf_counter() - clock.arrived_s)
        record.ttft_s = clock.ttft_s

    def _spent_tokens(self) -> int:
        """Usage comes last: a client that left before it has been served all the same, and pays what can be seen."""
        record = self._record
        prompt = self._prompt_tokens if record.prompt_tokens is None else record.prompt_tokens
        return prompt + (self._pieces if record.completion_tokens is None else record.completion_tokens)


def relayed_model(service: Service, body: bytes) -> ServedModel | None:
    """Return the model that a body names if its engines give text only."""
    relayed = [model for model in service.models.served() if model.relays is not None]
    name = model_named(body) if relayed else None
    return next((model for model in relayed if name is not None and model.name == name), None)


async def relay(
    service: Service,
    model: ServedModel,
    path: str,
    asked: RelayBody,
    caller: Caller,
    record: RequestRecord,
    channel: Channel,
    clock: RequestClock,
) -> None:
    """Answer one request. Raises what the client is to be told."""
    assert model.relays is not None
    model.check_open()
    request = _request(service, asked, path, caller, record)
    record.model, record.stream = model.name, asked.stream
    channel.add_header(*RELAY_HEADER)
    note_decisions(service, request.request_id, channel)
    if record.quota is not None:
        record.quota.hold(request.prompt_tokens, asked.max_output_tokens)
    account, has_run = Account(record, request.prompt_tokens), True
    try:
        await _pass_on(model.relays, request, asked, account, channel, clock, service.config.sse_keep_alive_s)
    except HeadraceError:
        has_run = account.has_begun
        raise
    finally:
        account.count(service, clock, has_run=has_run)


async def _pass_on(
    relays: RelaySupervisor,
    request: RelayRequest,
    asked: RelayBody,
    account: Account,
    channel: Channel,
    clock: RequestClock,
    keep_alive_s: float,
) -> None:
    # From here on: it may be long before a busy server begins.
    keep_alive = channel.keep_alive(keep_alive_s) if asked.stream else None
    try:
        async with relays.ask(request) as answer:
            if isinstance(answer, StreamedAnswer):
                await _pass_events(answer.chunks, asked, account, channel, clock)
            elif asked.stream:
                raise EngineDiedError("The engine's answer is no stream.")
            else:
                account.take(_chunk_of(answer.body))
                clock.output(0.0, 1)
                await channel.send_json(200, answer.body)
    finally:
        if keep_alive is not None:
            keep_alive.cancel()


def _request(service: Service, asked: RelayBody, path: str, caller: Caller, record: RequestRecord) -> RelayRequest:
    scope = service.cache_scope(caller.tenant, asked.cache_salt)
    data = asked.encoded(None if scope == PUBLIC_SCOPE else scope.hex())
    headers = {"X-Request-Id": record.request_id}
    if caller.trace is not None:
        headers["traceparent"] = caller.trace.parent
        if caller.trace.state:
            headers["tracestate"] = caller.trace.state
    return RelayRequest(
        # The client's own id need not be its alone.
        request_id=f"{record.request_id}-{secrets.token_hex(8)}",
        path=path,
        body=data,
        headers=headers,
        prompt_tokens=max(1, len(data) // CHARACTERS_A_TOKEN),
        priority=chosen_priority(asked.priority, caller.priority),
        session_id=caller.session or session_of_body(asked.session_fields),
        deadline_unix_s=caller.deadline_unix_s,
    )


async def _pass_events(
    chunks: AsyncIterator[bytes], asked: RelayBody, account: Account, channel: Channel, clock: RequestClock
) -> None:
    """Pass on whole events. A stream ends in [DONE] or in an error, whatever its server does."""
    lines, last_s = EventLines(), 0.0
    async for data in chunks:
        passed: list[bytes] = []
        try:
            for event in _events(lines, data):
                if event == DONE_DATA:
                    await channel.end(b"".join(passed) + DONE)
                    return
                chunk = _chunk_of(event)
                account.take(chunk)
                if chunk.choices:
                    last_s = clock.output(last_s, 1)
                if chunk.choices or chunk.usage is None or asked.wants_usage:
                    passed.append(b"data: " + event + b"\n\n")
        except HeadraceError:
            if passed:  # what was said before something went wrong
                await channel.write(b"".join(passed))
            raise
        if passed:
            await channel.write(b"".join(passed))
    if not account.is_finished:
        raise EngineDiedError("The engine's answer broke off.")
    await channel.end(DONE)


def _events(lines: EventLines, data: bytes) -> list[bytes]:
    try:
        return lines.feed(data)
    except ValueError as error:
        raise EngineDiedError(f"The engine's answer cannot be read: {error}") from None


def _chunk_of(data: bytes) -> Chunk:
    """Raises the error that it tells, and EngineDiedError for what is no answer."""
    return read_answer(data, Chunk, "something that is no answer")
