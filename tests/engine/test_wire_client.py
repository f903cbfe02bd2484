"""`RemoteEngine` against a real engine process: the protocol, early closes, death and return."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import uvloop

from engine.errors import (
    DrainingError,
    EngineDiedError,
    LoadingError,
    ModelError,
    PressureError,
    PromptTooLongError,
    RequestError,
    RequestFailedError,
)
from engine.protocol import GenerateRequest, TokenOutput
from engine.wire.client import OUTPUT_CREDIT, RemoteEngine
from engine.wire.merge import merge_outputs
from tests.support.scripted_engine import (
    ASSET,
    BUG,
    ScriptedProcess,
    scripted_process,
    scripted_tokens,
)
from tests.support.until import until
from tests.support.wire_requests import collect, request

ENDLESS = 1_000_000


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/e"


@pytest.fixture
def process(address: str) -> Iterator[ScriptedProcess]:
    with scripted_process(address, max_model_len=4096) as process:
        yield process


@pytest.fixture
async def engine(address: str) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(address)
    engine.open()
    yield engine
    engine.close()


async def test_an_engine_answers_over_the_wire_as_it_would_in_process(
    process: ScriptedProcess, engine: RemoteEngine
) -> None:
    assert engine.state().state == "loading"
    with pytest.raises(LoadingError):
        await engine.describe()
    with pytest.raises(LoadingError):
        await collect(engine, request())

    info = await engine.wait_ready()
    assert info == await engine.describe()
    assert info.model == "ok"
    assert info.incarnation == engine.state().incarnation
    assert await engine.fetch_asset(info.text.tokenizer.digest) == ASSET
    with pytest.raises(RequestError, match="no asset"):
        await engine.fetch_asset("0" * 64)

    outputs = await asyncio.gather(*(collect(engine, request(f"r{n}", seed=n, logprobs=0)) for n in range(64)))
    for number, output in enumerate(outputs):
        assert output.token_ids == scripted_tokens(number, 20)
        assert output.finish_reason == "length"
        assert output.logprobs is not None
        assert len(output.logprobs) == 20
        assert output.cached is not None
        assert output.cached.total == 7
    assert (await engine.load()).requests_total == {"length": 64}
    assert engine.num_running == 0


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (request(prompt_ids=[]), RequestError),
        (request(prompt_ids=[1] * 5000), PromptTooLongError),
        (request(prompt_ids=[BUG]), RequestFailedError),
        (request(prompt_ids=[2**40] * 2_000_000), RequestError),
    ],
    ids=["empty", "too long", "bug", "larger than a frame"],
)
async def test_a_refused_request_raises_and_the_next_one_works(
    process: ScriptedProcess, engine: RemoteEngine, bad: GenerateRequest, error: type[Exception]
) -> None:
    await engine.wait_ready()
    with pytest.raises(error) as caught:
        await collect(engine, bad)
    assert type(caught.value) is error
    if isinstance(caught.value, PromptTooLongError):
        assert (caught.value.prompt_tokens, caught.value.max_model_len) == (5000, 4096)
    assert (await collect(engine, request())).token_ids == scripted_tokens(1, 20)


async def test_a_full_engine_says_when_to_come_back(address: str, engine: RemoteEngine) -> None:
    with scripted_process(address, max_running=1):
        await engine.wait_ready()
        first = engine.generate(request("first", count=ENDLESS))
        await anext(first)
        with pytest.raises(PressureError) as caught:
            await collect(engine, request("second"))
        assert caught.value.retry_after_s == 0.25
        await first.aclose()


async def test_closing_the_iterator_early_frees_the_request(process: ScriptedProcess, engine: RemoteEngine) -> None:
    await engine.wait_ready()
    async for _ in engine.generate(request(count=ENDLESS)):
        break
    await until(lambda: engine.num_running == 0, "the engine ended the request")
    load = await engine.load()
    assert (load.running, load.requests_total) == (0, {"abort": 1})


async def test_finish_and_abort_end_the_stream_with_their_reasons(
    process: ScriptedProcess, engine: RemoteEngine
) -> None:
    await engine.wait_ready()
    for end, reason in ((lambda: engine.finish("r", 1), "stop"), (lambda: engine.abort("r"), "abort")):
        stream = engine.generate(request(count=ENDLESS))
        outputs = [await anext(stream)]
        await end()
        outputs += [output async for output in stream]
        assert outputs[-1].finish_reason == reason
        merged = merge_outputs(outputs)
        assert merged.token_ids == scripted_tokens(1, len(merged.token_ids))
    await engine.finish("unknown", 1)
    await engine.abort("unknown")


async def test_an_id_is_refused_while_it_runs_and_free_afterwards(
    process: ScriptedProcess, engine: RemoteEngine
) -> None:
    await engine.wait_ready()
    stream = engine.generate(request(count=ENDLESS))
    await anext(stream)
    with pytest.raises(RequestError, match="running already"):
        await collect(engine, request())
    await stream.aclose()
    # Not yet ended by the engine, but a higher attempt cannot be confused with it.
    assert (await collect(engine, request(seed=2, attempt=1))).token_ids == scripted_tokens(2, 20)
    await until(lambda: engine.num_running == 0, "both attempts ended")


async def test_a_thousand_aborts_and_closes_leave_nothing_behind(
    process: ScriptedProcess, engine: RemoteEngine
) -> None:
    await engine.wait_ready()
    rng = random.Random(5)

    async def client(number: int) -> None:
        request_id, patience = f"r{number}", rng.randrange(6)
        stream = engine.generate(request(request_id, seed=number, count=rng.choice([1, 3, ENDLESS])))
        match rng.randrange(4):
            case 0:
                task = asyncio.create_task(anext(stream))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
            case 1:
                await engine.abort(request_id)
                async for _ in stream:
                    await engine.abort(request_id)
            case 2:
                async for output in stream:
                    if output.offset >= patience:
                        await engine.finish(request_id, patience)
            case _:
                async for output in stream:
                    if output.offset >= patience:
                        break
        await stream.aclose()

    for start in range(0, 1000, 100):
        await asyncio.gather(*(client(number) for number in range(start, start + 100)))
    await until(lambda: engine.num_running == 0, "every request ended at the client")
    load = await engine.load()
    assert load.running == 0
    assert set(load.requests_total) == {"abort", "stop", "length"}
    assert engine.counters == {"malformed_frames": 0, "late_outputs": 0, "lost_connections": 0, "given_up": 0}


async def test_a_killed_engine_fails_every_stream_and_is_found_again(
    process: ScriptedProcess, engine: RemoteEngine
) -> None:
    before = await engine.wait_ready()
    streams = [engine.generate(request(f"r{n}", count=ENDLESS)) for n in range(10)]
    for stream in streams:
        await anext(stream)
    process.signal(signal.SIGKILL)

    async def last_word(stream: AsyncIterator[TokenOutput]) -> None:
        async for output in stream:
            assert output.finish_reason is None

    results = await asyncio.gather(*(last_word(stream) for stream in streams), return_exceptions=True)
    assert [type(result) for result in results] == [EngineDiedError] * 10
    assert engine.state().state == "dead"
    with pytest.raises(EngineDiedError):
        await collect(engine, request())
    with pytest.raises(EngineDiedError):
        await engine.load()

    await process.restart()
    after = await engine.wait_ready()
    assert after.incarnation != before.incarnation
    assert (await collect(engine, request())).token_ids == scripted_tokens(1, 20)


async def test_a_killed_client_has_its_requests_ended(
    process: ScriptedProcess, engine: RemoteEngine, address: str
) -> None:
    await engine.wait_ready()
    script = (
        "import asyncio, sys\n"
        "from engine.wire.client import RemoteEngine\n"
        "from engine.protocol import GenerateRequest, SamplingParams\n"
        "async def main():\n"
        f"    engine = RemoteEngine({address!r}); engine.open(); await engine.wait_ready()\n"
        "    sampling = SamplingParams(seed=1, max_tokens=1000000)\n"
        "    request = GenerateRequest(request_id='r', prompt_ids=[1], sampling=sampling)\n"
        "    async for _ in engine.generate(request): pass\n"
        "asyncio.run(main())\n"
    )
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", script, cwd=Path(__file__).parents[2])
    try:

        async def running(count: int) -> bool:
            return (await engine.load()).running == count

        await until(lambda: running(1), "the other client's request runs")
        client.kill()
        await until(lambda: running(0), "it was ended")
        assert (await engine.load()).requests_total == {"abort": 1}
    finally:
        if client.returncode is None:
            client.kill()
        await client.wait()


async def test_sigterm_lets_running_requests_finish_and_takes_no_new_one(
    process: ScriptedProcess, engine: RemoteEngine
) -> None:
    await engine.wait_ready()
    stream = engine.generate(request(count=300))
    outputs = [await anext(stream)]
    process.signal(signal.SIGTERM)
    await until(lambda: engine.state().state == "draining", "the engine drains")
    with pytest.raises(DrainingError):
        await collect(engine, request("late"))
    outputs += [output async for output in stream]
    assert merge_outputs(outputs).token_ids == scripted_tokens(1, 300)
    assert outputs[-1].finish_reason == "length"
    assert await process.died() == 0


async def test_a_bad_model_is_told_with_its_reason_and_exit_code_2(address: str, engine: RemoteEngine) -> None:
    with scripted_process(address, model="bad-model") as process:
        assert await process.died() == 2
        await until(lambda: engine.state().error is not None, "the reason came")
        error = engine.state().error
        assert isinstance(error, ModelError)
        assert (str(error), error.hint) == ("The file weights.bin ends too early.", "Fetch it again.")
        await until(lambda: engine.state().state == "dead", "the connection was lost")
        assert engine.state().message == "The file weights.bin ends too early."


async def test_a_consumer_that_does_not_read_holds_up_nobody(process: ScriptedProcess, engine: RemoteEngine) -> None:
    await engine.wait_ready()
    idle = engine.generate(request("idle", seed=3, count=400))
    first = await anext(idle)
    # Many times the credit passes while nobody reads "idle".
    assert (await collect(engine, request(count=OUTPUT_CREDIT * 10))).token_ids == scripted_tokens(
        1, OUTPUT_CREDIT * 10
    )
    rest = [output async for output in idle]
    assert merge_outputs([first, *rest]).token_ids == scripted_tokens(3, 400)


async def test_a_loop_that_stalls_gets_the_rest_in_one_piece(process: ScriptedProcess, engine: RemoteEngine) -> None:
    await engine.wait_ready()
    stream = engine.generate(request(count=2000))
    outputs = [await anext(stream)]

    async def see_it_done() -> None:
        other = RemoteEngine(engine.address)
        other.open()
        await other.wait_ready()

        async def is_done() -> bool:
            return (await other.load()).running == 0

        await until(is_done, "the engine has made all tokens")
        other.close()

    watcher = threading.Thread(target=lambda: asyncio.run(see_it_done()))
    watcher.start()
    watcher.join()  # blocks this loop, as a long computation would

    outputs += [output async for output in stream]
    assert merge_outputs(outputs).token_ids == scripted_tokens(1, 2000)
    assert len(outputs) < 2000 - OUTPUT_CREDIT, "what exceeded the credit came merged"
    assert engine.counters["lost_connections"] == 0


def test_it_works_under_uvloop(process: ScriptedProcess, address: str) -> None:
    async def main() -> list[int]:
        engine = RemoteEngine(address)
        engine.open()
        try:
            await engine.wait_ready()
            stream = engine.generate(request("closed", count=ENDLESS))
            await anext(stream)
            await stream.aclose()
            tokens = (await collect(engine, request())).token_ids
            process.signal(signal.SIGKILL)
            await until(lambda: engine.state().state == "dead", "the death is noticed")
            return tokens
        finally:
            engine.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == scripted_tokens(1, 20)
