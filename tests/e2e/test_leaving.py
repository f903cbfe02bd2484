"""A client that leaves costs the engine two steps at most, streaming or not, running or waiting."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support.headrace_server import HeadraceServer, headrace
from tests.support.raw_http import send
from tests.support.storm import COMPLETIONS
from tests.support.tiny_models import write_tiny_llama
from tests.support.until import until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeadraceServer]:
    """An engine for one request at a time, whose steps take long compared with a message's way to it."""
    directory = tmp_path_factory.mktemp("leaving")
    model = write_tiny_llama(directory / "model", hidden_size=512, intermediate_size=1536, layers=6, heads=8)
    with headrace(directory, model, threads=1, max_running=1, kv_cache_memory="16MiB") as server:
        yield server


def body(server: HeadraceServer, **fields: object) -> dict[str, object]:
    return {"model": server.model, "prompt": "Hi", "max_tokens": 400, "ignore_eos": True, **fields}


async def until_tokens(server: HeadraceServer, tokens: float) -> None:
    async def so_many() -> bool:
        return (await server.load()).output_tokens_total >= tokens

    await until(so_many, "the answer is under way")


def logged(server: HeadraceServer) -> int:
    """Requests that have ended at the HTTP layer. A log line comes when the engine has been told."""
    return server.text.count(f"POST {COMPLETIONS} ")


async def until_noticed(server: HeadraceServer, count: int) -> None:
    await until(lambda: logged(server) == count, "the API process has noticed")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_running_request_ends_within_two_steps(server: HeadraceServer, stream: bool) -> None:
    """The engine is stopped while the client leaves, so that its steps are counted from the moment this is known."""
    await server.wait_ready()
    before, left = await server.wait_idle(), logged(server)
    told_before = (await server.metrics())["headrace_generation_tokens_total"]
    _, writer = await send(await server.url(), COMPLETIONS, body(server, stream=stream))
    await until_tokens(server, before.output_tokens_total + 5)
    server.core.send_signal(signal.SIGSTOP)
    try:
        writer.close()
        await until_noticed(server, left + 1)
    finally:
        server.core.send_signal(signal.SIGCONT)
    after = await server.wait_idle()
    told = (await server.metrics())["headrace_generation_tokens_total"] - told_before
    assert told >= 3
    steps = after.output_tokens_total - before.output_tokens_total - told
    assert steps <= 2, "tokens that were made after the client had left"
    assert after.requests_total["abort"] == before.requests_total.get("abort", 0) + 1
    assert after.kv_blocks_used == before.kv_blocks_used == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_waiting_request_never_runs(server: HeadraceServer, stream: bool) -> None:
    await server.wait_ready()
    before, left = await server.wait_idle(), logged(server)
    url = await server.url()
    _, running = await send(url, COMPLETIONS, body(server, stream=True))
    await until_tokens(server, before.output_tokens_total + 1)
    _, waiting = await send(url, COMPLETIONS, body(server, stream=stream, prompt="one that waits"))

    async def it_waits() -> bool:
        return (await server.load()).waiting == 1

    await until(it_waits, "it waits")
    waiting.close()
    await until_noticed(server, left + 1)
    running.close()
    after = await server.wait_idle()
    assert after.prefill_tokens_total == before.prefill_tokens_total + 2, "only the running request's prompt was read"
    assert after.requests_total["abort"] == before.requests_total.get("abort", 0) + 2
