"""The client of benchmarks/gateway.py: streaming requests at the times of a Poisson process, over open connections.

A process of its own, as small as it can be: what it computes is taken from the gateway on a machine with few cores.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import cast

import msgspec
import uvloop

from server.bench.serve_workload import WORDS

WORD_IDS, BYTES_PER_TOKEN = range(1000, 40_000), 5
EVENT, END = b"data: {", b"\r\n0\r\n\r\n"


class Answer(msgspec.Struct, array_like=True):
    """Times are of the clock that all processes of the machine share. `answer_id` is empty where there was none."""

    due_s: float
    sent_s: float
    first_s: float = 0.0
    answer_id: str = ""
    events: int = 0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    rate: float
    seconds: float
    prompt_bytes: int
    tokens: int
    seed: int
    ids: bool = False
    """Prompts are token ids, as many as their bytes would be."""


def run(url: str, load: Load) -> list[Answer]:
    """Send everything and return what came, in the order in which it was due."""
    host, _, port = url.removeprefix("http://").partition(":")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_send_all(host, int(port), load))


async def _send_all(host: str, port: int, load: Load) -> list[Answer]:
    loop, draw = asyncio.get_running_loop(), random.Random(load.seed)
    idle: list[_Connection] = []
    answers: list[Answer] = []
    ends: list[asyncio.Future[None]] = []
    # Made beforehand, so that nothing but sending is done while the clock runs.
    requests = [(draw.expovariate(load.rate), _request(draw, load)) for _ in range(round(load.rate * load.seconds))]
    due_s = time.monotonic()
    for gap_s, request in requests:
        due_s += gap_s
        await asyncio.sleep(due_s - time.monotonic())
        if idle:
            connection = idle.pop()
        else:
            _, connection = await loop.create_connection(lambda: _Connection(idle), host, port)
        answer = Answer(due_s, time.monotonic())
        answers.append(answer)
        ends.append(connection.ask(request, answer))
    await asyncio.wait_for(asyncio.gather(*ends), 60)
    for connection in idle:
        connection.close()
    return answers


def _request(draw: random.Random, load: Load) -> bytes:
    """A prompt of its own each."""
    fields: dict[str, object] = {"model": "fake", "max_tokens": load.tokens, "ignore_eos": True, "stream": True}
    if load.ids:
        path, fields["prompt"] = "completions", draw.choices(WORD_IDS, k=load.prompt_bytes // BYTES_PER_TOKEN)
    else:
        words = " ".join(draw.choices(WORDS, k=load.prompt_bytes // 4))[: load.prompt_bytes]
        path, fields["messages"] = "chat/completions", [{"role": "user", "content": words}]
    data = json.dumps(fields).encode()
    head = (
        f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class _Connection(asyncio.Protocol):
    """One request at a time; back among the `idle` ones when it has been answered."""

    def __init__(self, idle: list[_Connection]) -> None:
        self._idle = idle
        self._transport: asyncio.WriteTransport | None = None
        self._answer: Answer | None = None
        self._end: asyncio.Future[None] | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is none by its class

    def ask(self, request: bytes, answer: Answer) -> asyncio.Future[None]:
        assert self._transport is not None
        self._answer, self._end = answer, asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._end

    def data_received(self, data: bytes) -> None:
        answer, end = self._answer, self._end
        if answer is None or end is None:
            return
        text = self._tail + data
        if not answer.first_s and EVENT in text:
            answer.first_s = time.monotonic()
            answer.answer_id = _id_in(text)
        answer.events += text.count(EVENT)
        # No longer than can be part of an event's beginning, which must not be counted twice.
        self._tail = text[-(len(EVENT) - 1) :]
        if text.endswith(END):
            self._answer, self._tail = None, b""
            self._idle.append(self)
            end.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        if self._end is not None and not self._end.done():
            self._end.set_exception(error or ConnectionError("The server closed the connection."))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _id_in(text: bytes) -> str:
    start = text.index(b'"id":"') + len(b'"id":"')
    return text[start : text.index(b'"', start)].decode()
