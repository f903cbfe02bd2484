"""The control calls of a client: one question, one answer, matched by number. Knows no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.errors import EngineError, HeadraceError
from engine.wire import messages as wire
from engine.wire.errors import from_wire

CALL_TIMEOUT_S = 30.0
"""An engine answers between two steps."""


class Calls:
    """What was asked and not yet answered. `send` puts a message on its way."""

    def __init__(self, send: Callable[[wire.ClientMessage], None]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[wire.Reply]] = {}
        self._last_id = 0

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    async def ask(self, message: wire.Call) -> wire.Reply:
        """Raises what the engine answers, EngineError when it does not, and what `fail` was told."""
        future: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()
        self._waiting[message.call_id] = future
        try:
            self._send(message)
            reply = await asyncio.wait_for(future, CALL_TIMEOUT_S)
        except TimeoutError:
            raise EngineError(f"The engine has not answered for {CALL_TIMEOUT_S:g} s.") from None
        finally:
            self._waiting.pop(message.call_id, None)
        if isinstance(reply, wire.ErrorReply):
            raise from_wire(reply.error)
        return reply

    def answer(self, reply: wire.Reply) -> None:
        """Unknown numbers are ignored: nobody waits any more."""
        if (call := self._waiting.get(reply.call_id)) is not None and not call.done():
            call.set_result(reply)

    def fail(self, error: HeadraceError) -> None:
        for call in self._waiting.values():
            if not call.done():
                call.set_exception(error)
