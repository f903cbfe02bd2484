"""A client that leaves takes its requests with it: each kind of leaving aborts in the engine, and nothing is left."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from tests.support.api_server import ApiServer, chat_body, completion_body, serving
from tests.support.fake_engine import FakeEngine, Gate

CHAT = "/v1/chat/completions"


async def raw_request(server: ApiServer, path: str, body: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request over a bare connection, which can then be cut in any way."""
    url = httpx.URL(server.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    return reader, writer


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 2])
async def test_leaving_aborts_every_choice(n: int, stream: bool, after: int) -> None:
    engine = FakeEngine()
    gate = engine.gate = Gate(after=after)
    async with serving(engine) as server:
        _, writer = await raw_request(server, CHAT, chat_body(stream=stream, n=n))
        await gate.reached.wait()
        writer.close()
        await engine.until(lambda: not engine.running)
        assert len(engine.aborted) == len(engine.seen) <= n
        assert engine.aborted
        metrics = (await server.client.get("/metrics")).text
        gate.opened.set()
        assert (await server.chat()).status_code == 200
    assert "headrace_client_disconnects_total 1.0" in metrics


async def test_a_reset_is_leaving_too() -> None:
    engine = FakeEngine()
    gate = engine.gate = Gate(after=1)
    async with serving(engine) as server:
        _, writer = await raw_request(server, "/v1/completions", completion_body(stream=True))
        await gate.reached.wait()
        writer.transport.abort()
        await engine.until(lambda: not engine.running)
    assert len(engine.aborted) == 1


async def test_leaving_inside_the_body_reaches_no_engine() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        url = httpx.URL(server.url)
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        assert (await server.complete()).status_code == 200
    assert len(engine.seen) == 1


async def test_a_stream_that_ended_is_no_abort() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        reader, writer = await raw_request(server, CHAT, chat_body(stream=True))
        await reader.readuntil(b"[DONE]")
        writer.close()
        await engine.until(lambda: not engine.running)
        metrics = (await server.client.get("/metrics")).text
    assert engine.aborted == []
    assert "headrace_client_disconnects_total 0.0" in metrics


async def test_one_failed_choice_aborts_the_others() -> None:
    engine = FakeEngine()
    engine.reply = lambda request: [5] * (3 if (request.sampling.seed or 0) == 0 else 400)
    engine.gate = Gate(after=2)

    def fail_first(request: object) -> list[int]:
        raise RuntimeError("this choice alone")

    async with serving(engine) as server:
        plain = engine.reply
        engine.reply = lambda request: fail_first(request) if request.sampling.seed == 2 else plain(request)
        response = await server.chat(n=3, seed=0)
        await engine.until(lambda: not engine.running)
    assert response.status_code == 500
    assert len(engine.aborted) == 3


async def test_many_random_partings_leave_nothing_behind() -> None:
    engine = FakeEngine()
    gate = engine.gate = Gate(after=3)
    async with serving(engine) as server:
        connections = [
            await raw_request(server, CHAT, chat_body(stream=number % 2 == 0, n=1 + number % 3)) for number in range(40)
        ]
        await gate.reached.wait()
        for number, (_, writer) in enumerate(connections):
            if number % 4:
                writer.close()
            else:
                writer.transport.abort()
        gate.opened.set()
        while server.service.traffic.running:
            await engine.until(lambda: not engine.running)
            await asyncio.sleep(0)
        assert engine.running == set()
        assert (await server.chat()).status_code == 200
