"""What a client may do to a connection: broken, endless, slow and pipelined HTTP, and asking for another protocol."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from server import connection
from server.config import ServeConfig
from tests.support.api_server import ApiServer, completion_body, serving
from tests.support.fake_engine import FakeEngine, Gate

END = b"\r\n"


@asynccontextmanager
async def connected(server: ApiServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    url = httpx.URL(server.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        yield reader, writer
    finally:
        writer.close()


def post(body: object = None, *headers: bytes, close: bool = False) -> bytes:
    data = json.dumps(completion_body() if body is None else body).encode()
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(data), *headers]
    return END.join([*lines, *([b"Connection: close"] if close else []), b"", data])


async def answer(server: ApiServer, data: bytes) -> bytes:
    """Send bytes; return what comes back until the server closes."""
    async with connected(server) as (reader, writer):
        writer.write(data)
        return await reader.read()


async def send_for_ever(writer: asyncio.StreamWriter, data: bytes) -> None:
    while True:
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0)


def status_and_error(response: bytes) -> tuple[int, dict[str, object]]:
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"x-request-id: " in head
    assert b"content-type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


BROKEN = {
    "garbage": b"\x16\x03\x01\x00\xc8garbage\r\n\r\n",
    "http/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "unknown version": b"GET /health HTTP/9.9\r\n\r\n",
    "bytes in the path": b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
    "connect": b"CONNECT a:80 HTTP/1.1\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    "length and chunks": b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "negative length": b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    "length of 70 bits": b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    "chunk that is no number": b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "NUL in a header": b"GET /health HTTP/1.1\r\nX: a\0b\r\n\r\n",
    "line break in a header": b"GET /health HTTP/1.1\r\nX: a\rb\r\n\r\n",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
async def test_broken_http_gets_the_apis_own_error(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeEngine()) as server:
        status, error = status_and_error(await answer(server, data))
        assert (await server.complete()).status_code == 200
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_http")
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS_HEADS = {
    "url": (b"GET /", b"a" * 10_000),
    "query": (b"GET /health?", b"a" * 10_000),
    "header": (b"GET /health HTTP/1.1\r\nX: ", b"a" * 10_000),
    "header name": (b"GET /health HTTP/1.1\r\n", b"a" * 10_000),
    "headers": (b"GET /health HTTP/1.1\r\n", b"X: a\r\n" * 1_000),
    "trailer": (CHUNKED + b"0\r\nX: ", b"a" * 10_000),
    "trailers": (CHUNKED + b"0\r\n", b"X: a\r\n" * 1_000),
    "chunk extension": (CHUNKED + b"5;a=", b"a" * 10_000),
    "headers of a second request": (b"GET /health HTTP/1.1\r\n\r\nGET /health HTTP/1.1\r\n", b"X: a\r\n" * 1_000),
}


@pytest.mark.parametrize(("begin", "more"), ENDLESS_HEADS.values(), ids=ENDLESS_HEADS)
async def test_endless_framing_is_refused(begin: bytes, more: bytes) -> None:
    async with serving(FakeEngine()) as server, connected(server) as (reader, writer):
        writer.write(begin)
        reading = asyncio.create_task(reader.read())
        sending = asyncio.create_task(send_for_ever(writer, more))
        response = await reading  # the server ends its side, and then waits for the client's end
        sending.cancel()
        assert (await server.complete()).status_code == 200
    last = response[response.rindex(b"HTTP/1.1 ") :]
    status, error = status_and_error(last)
    assert (status, error["code"]) == (431, "headers_too_large")


async def test_a_head_in_one_piece_is_bounded_too() -> None:
    async with serving(FakeEngine()) as server:
        large = await answer(server, post(None, b"X: " + b"a" * 70_000, close=True))
        fits = await answer(server, post(None, b"X: " + b"a" * 60_000, close=True))
    assert status_and_error(large)[0] == 431
    assert fits.startswith(b"HTTP/1.1 200 ")


async def test_requests_without_bodies_do_not_add_up() -> None:
    """A connection may be used for ever: what its earlier requests were long is not held against a later one."""
    get = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Padding: " + b"p" * 20_000 + b"\r\n\r\n"
    head, _, body = post(None, b"Expect: 100-continue", close=True).partition(b"\r\n\r\n")
    async with serving(FakeEngine()) as server, connected(server) as (reader, writer):
        for _ in range(5):
            writer.write(get)
            answered = await reader.readuntil(b"\r\n\r\n")
            assert answered.startswith(b"HTTP/1.1 200")
            await reader.readexactly(int(answered.lower().split(b"content-length: ")[1].split()[0]))
        writer.write(head + b"\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100"), "the head was read by itself"
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")


async def test_a_slow_head_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    async with serving(FakeEngine()) as server:
        status, error = status_and_error(await answer(server, b"GET /health HTTP/1.1\r\nX: "))
    assert (status, error["code"]) == (408, "request_timeout")


async def test_a_connection_on_which_nothing_is_asked_is_closed() -> None:
    async with serving(FakeEngine(), config=ServeConfig(keep_alive_s=1)) as server:
        async with connected(server) as (reader, _), asyncio.timeout(10):
            assert await reader.read() == b""
        early = b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n"
        async with connected(server) as (reader, writer), asyncio.timeout(10):
            writer.write(early)
            await reader.readuntil(b"}}")
            writer.write(b"abc")  # the rest of what was answered already begins no new request
            assert await reader.read() == b""


@pytest.mark.parametrize("path", [b"/v1/completions", b"/health", b"/nothing"])
async def test_a_body_that_goes_on_behind_its_answer_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, path: bytes
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.05)
    async with serving(FakeEngine(), config=ServeConfig(max_body_bytes=1000)) as server:
        async with connected(server) as (_, writer), asyncio.timeout(20):
            writer.write(b"POST " + path + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
            with pytest.raises(ConnectionError):
                await send_for_ever(writer, b"400\r\n" + b"a" * 1024 + b"\r\n")
        assert (await server.complete()).status_code == 200


UPGRADES = [
    (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAAB"),
    (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: a"),
]


@pytest.mark.parametrize("headers", UPGRADES)
@pytest.mark.parametrize("cut", [None, -1, -20, 40])
async def test_a_request_that_asks_for_another_protocol_is_answered_in_this_one(
    headers: tuple[bytes, ...], cut: int | None
) -> None:
    data = post(None, *headers)
    async with serving(FakeEngine()) as server, connected(server) as (reader, writer), asyncio.timeout(10):
        writer.write(data[:cut])
        if cut is not None:
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.write(data[cut:])
        first = await reader.readuntil(b"}}")
        writer.write(b"GET /health HTTP/1.1\r\n%b\r\n\r\n" % END.join(headers) + post(close=True))
        rest = await reader.read()
    assert first.startswith(b"HTTP/1.1 200 ")
    assert b'"object":"text_completion"' in first
    assert rest.count(b"HTTP/1.1 200 ") == 2


async def test_a_chunked_request_that_asks_for_another_protocol_is_whole() -> None:
    data = json.dumps(completion_body()).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    chunks = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (5, data[:5], len(data) - 5, data[5:])
    async with serving(FakeEngine()) as server, connected(server) as (reader, writer), asyncio.timeout(10):
        writer.write(head + chunks)
        assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 200 ")


async def test_pipelined_requests_are_answered_in_order() -> None:
    requests = [post({**completion_body(), "prompt": f"number {i}"}) for i in range(40)]
    async with serving(FakeEngine()) as server:
        response = await answer(server, b"".join(requests) + post(close=True))
    texts = [json.loads(part.split(b"\r\n\r\n")[1])["choices"][0]["text"] for part in response.split(b"HTTP/1.1 ")[1:]]
    assert len(texts) == 41
    assert all(str(i)[-1] in text for i, text in enumerate(texts[:40]))


async def test_leaving_ends_a_request_that_others_are_pipelined_behind() -> None:
    engine = FakeEngine()
    gate = engine.gate = Gate(after=2)
    async with serving(engine) as server:
        async with connected(server) as (_, writer):
            writer.write(post() + post())
            await gate.reached.wait()
        await engine.until(lambda: not engine.running)
        assert len(engine.aborted) == len(engine.seen) == 1
        gate.opened.set()
        assert (await server.complete()).status_code == 200


async def test_garbage_behind_a_request_does_not_get_into_its_stream() -> None:
    engine = FakeEngine()
    gate = engine.gate = Gate(after=2)
    async with serving(engine) as server:
        async with connected(server) as (reader, writer), asyncio.timeout(10):
            writer.write(post({**completion_body(), "stream": True}))
            await gate.reached.wait()
            await reader.readuntil(b"data: ")
            writer.write(b"garbage\r\n\r\n")
            rest = await reader.read()
        await engine.until(lambda: not engine.running)
    assert b"HTTP/1.1" not in rest
    assert b"invalid_http" not in rest


async def test_a_client_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WRITE_STALL_S", 0.05)
    engine = FakeEngine(max_model_len=2_000_000, kv_capacity_tokens=2_000_000)
    engine.reply = lambda request: [5] * 100_000
    engine.cuts = [1_000]
    async with serving(engine) as server:
        url = httpx.URL(server.url)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((url.host, url.port))
            client.sendall(post(completion_body(stream=True, logprobs=0, max_tokens=100_000)))
            await engine.until(lambda: len(engine.seen) == 1 and not engine.running)
    assert len(engine.aborted) == 1


async def test_more_connections_than_the_process_can_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(FakeEngine()) as server:
        assert (await server.complete()).status_code == 200
        monkeypatch.setattr(connection, "max_connections", lambda: 2)
        async with connected(server) as (reader, writer):  # the second, behind the client's own
            writer.write(b"GET /health HTTP/1.1\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            status, error = status_and_error(await answer(server, b""))
            assert (status, error["code"]) == (503, "too_many_connections")
        assert (await server.complete()).status_code == 200


async def test_head_is_get_without_a_body() -> None:
    async with serving(FakeEngine()) as server, connected(server) as (reader, writer):
        writer.write(b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"content-length: 0" not in head
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 "), "nothing came behind the head"
        refused = await answer(server, b"HEAD /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 405 ")
        assert refused.endswith(b"\r\n\r\n")
