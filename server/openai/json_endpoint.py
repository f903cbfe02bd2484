"""A route that takes a JSON body and answers with JSON, under the same bounds and with the same ends as generation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.types import Receive, Scope, Send

from server.access.record import record_of
from server.openai.channel import Channel
from server.openai.exchange import answer_request, note_ignored, prepared_in_turn
from server.request_body import Body
from server.service import Service


@dataclass(frozen=True)
class Reply:
    """`ignored` are the names of the body's unknown fields."""

    value: object
    ignored: Sequence[str] = ()


Answer = Callable[[Service, bytes], Awaitable[Reply]]


class JsonEndpoint:
    """The ASGI application of one route. `needs_model` refuses it while there is no model's text."""

    def __init__(self, service: Service, answer: Answer, *, needs_model: bool = True) -> None:
        self.service = service
        self.answer = answer
        self.needs_model = needs_model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = self.service.caller(record_of(scope))

        async def answer(body: Body, channel: Channel) -> None:
            reply = await prepared_in_turn(self.service, caller, partial(self.answer, self.service, body.take()))
            note_ignored(self.service, reply.ignored, channel)
            await channel.send_json(200, msgspec.json.encode(reply.value))

        await answer_request(self.service, scope, receive, send, answer, needs_model=self.needs_model)
