"""CPU time of one API process per streamed token: engine, API process and clients are processes of their own.

    python -m benchmarks.api_process [--streams 64] [--tokens 200] [--step-ms 10] [--runs 5]

The engine is a fake behind the real wire: one message per step for all streams. Prints the CPU time per token of each
run and the median, and what one token costs in the cheapest possible server (an ASGI application that streams constant
bytes at the same pace) for comparison on the same machine. Needs psutil.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import tempfile

import psutil
import uvicorn

from benchmarks.readiness import wait_ready
from server.config import ServeConfig
from tests.support.processes import api_processes, text_core

WARM_UP_TOKENS = 20


def main() -> None:
    options = _options()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="hr-") as directory:
        address = f"ipc://{directory}/engine"
        with (
            text_core(address, step_s=options.step_ms / 1000),
            api_processes(address, config=ServeConfig(log_level="warning")) as (api,),
        ):
            wait_ready(api.url, "the API process")
            ours = _measure(context, api.url, psutil.Process(api.process.pid), options)
    floor = _measure_floor(context, options)
    print(f"{options.streams} streams, {options.tokens} tokens each, a step every {options.step_ms:g} ms")
    print("API process, us of CPU per token:", *(f"{value:.1f}" for value in ours))
    print(f"median {statistics.median(ours):.1f} us; constant bytes from a bare ASGI server {floor:.1f} us")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=10)
    parser.add_argument("--runs", type=int, default=5)
    return parser.parse_args()


def _measure(
    context: multiprocessing.context.SpawnContext, url: str, server: psutil.Process, options: argparse.Namespace
) -> list[float]:
    """Return the server's CPU microseconds per token of each run, after a warm-up."""
    results = []
    for tokens in [WARM_UP_TOKENS] + [options.tokens] * options.runs:
        before = server.cpu_times()
        with context.Pool(1) as pool:
            events = pool.apply(read_streams, (url, options.streams, tokens))
        after = server.cpu_times()
        if events < options.streams * tokens:
            raise SystemExit(f"{events} events came, {options.streams * tokens} were due")
        spent_s = after.user + after.system - before.user - before.system
        results.append(spent_s / (options.streams * tokens) * 1e6)
    return results[1:]


def read_streams(url: str, streams: int, tokens: int) -> int:
    """The clients: read all streams at once; return the number of events."""
    host, _, port = url.removeprefix("http://").partition(":")
    return sum(asyncio.run(_read_all(host, int(port), streams, tokens)))


async def _read_all(host: str, port: int, streams: int, tokens: int) -> list[int]:
    return await asyncio.gather(*(_read_one(host, port, tokens) for _ in range(streams)))


async def _read_one(host: str, port: int, tokens: int) -> int:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Say the alphabet."}],
        "max_tokens": tokens,
        "stream": True,
    }
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode() + data)
    events, tail = 0, b""
    while part := await reader.read(65536):
        text = tail + part
        events += text.count(b"data: {")
        tail = text[-6:]
    writer.close()
    return events


def _measure_floor(context: multiprocessing.context.SpawnContext, options: argparse.Namespace) -> float:
    """Return the median of a server that has nothing to do but to send."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = context.Process(target=serve_constant, args=(listener, options.tokens, options.step_ms / 1000))
        server.start()
        try:
            return statistics.median(_measure(context, url, psutil.Process(server.pid), options))
        finally:
            server.kill()
            server.join()


def serve_constant(listener: socket.socket, tokens: int, step_s: float) -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null}]}\n\n'

    async def app(scope: dict, receive: object, send: object) -> None:  # type: ignore[type-arg]
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        for _ in range(tokens):
            await asyncio.sleep(step_s)
            await send({"type": "http.response.body", "body": event, "more_body": True})  # type: ignore[operator]
        await send({"type": "http.response.body"})  # type: ignore[operator]

    config = uvicorn.Config(app, loop="uvloop", http="httptools", lifespan="off", access_log=False, log_level="error")
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
