"""kill -9 of a real engine process in the middle of streams: the client sees exactly the undisturbed tokens."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from engine.errors import EngineDiedError, RequestFailedError
from engine.protocol import GenerateRequest, SamplingParams, TokenOutput
from engine.wire.client import RemoteEngine
from engine.wire.merge import merge_outputs
from router.supervisor import Supervisor
from tests.support.scripted_engine import POISON, ScriptedProcess, scripted_process, scripted_tokens
from tests.support.static_pool import StaticPool, StaticTarget
from tests.support.until import until


@asynccontextmanager
async def running(path: Path, count: int) -> AsyncIterator[tuple[Supervisor, list[ScriptedProcess], StaticPool]]:
    """A supervisor in front of `count` engine processes."""
    async with AsyncExitStack() as stack:
        processes, targets = [], []
        for number in range(count):
            address = f"ipc://{path}/{number}"
            processes.append(stack.enter_context(scripted_process(address)))
            engine = RemoteEngine(address)
            engine.open()
            stack.callback(engine.close)
            targets.append(StaticTarget(address, engine))
        for target in targets:
            await target.engine.wait_ready()
        pool = StaticPool(targets)
        yield Supervisor(pool), processes, pool


def request(number: int, count: int = 600, prompt: int = 1) -> GenerateRequest:
    sampling = SamplingParams(seed=number, max_tokens=count)
    return GenerateRequest(request_id=f"r{number}", prompt_ids=[prompt], sampling=sampling)


async def collect(supervisor: Supervisor, wanted: GenerateRequest) -> list[TokenOutput]:
    return [output async for output in supervisor.generate(wanted)]


def assert_undisturbed(outputs: list[TokenOutput], number: int, count: int = 600) -> None:
    position = 0
    for output in outputs:
        assert output.offset == position
        position += len(output.token_ids)
    whole = merge_outputs(outputs)
    assert whole.token_ids == scripted_tokens(number, count)
    assert (whole.finish_reason, whole.cached and whole.cached.total) == ("length", 7)


async def test_streams_resume_on_the_restarted_engine(tmp_path: Path) -> None:
    async with running(tmp_path, 1) as (supervisor, (process,), pool):
        tasks = [asyncio.create_task(collect(supervisor, request(number, 1000))) for number in range(32)]
        for _ in range(2):
            await until(lambda: until_steps(supervisor, 20), "the streams are under way")
            process.signal(signal.SIGKILL)
            await process.restart()
            await until(lambda: pool.targets[0].engine.is_ready, "the engine is back")
        for number, outputs in enumerate(await asyncio.gather(*tasks)):
            assert_undisturbed(outputs, number, 1000)
        assert supervisor.counters["resumed"] > 32, "both kills hit running streams"
        assert pool.in_flight == {pool.targets[0].target_id: 0}
        assert (await supervisor.load()).running == 0


async def until_steps(supervisor: Supervisor, steps: int) -> bool:
    try:
        return (await supervisor.load()).steps_total >= steps
    except EngineDiedError:
        return False  # its death was not known yet


async def test_streams_move_to_the_engine_that_is_left(tmp_path: Path) -> None:
    async with running(tmp_path, 2) as (supervisor, processes, pool):
        tasks = [asyncio.create_task(collect(supervisor, request(number))) for number in range(16)]
        await until(lambda: until_steps(supervisor, 20), "the streams are under way")
        processes[0].signal(signal.SIGKILL)
        for number, outputs in enumerate(await asyncio.gather(*tasks)):
            assert_undisturbed(outputs, number)
        assert supervisor.counters["resumed"] > 0
        assert set(pool.in_flight.values()) == {0}


async def test_a_request_that_kills_its_engine_ends_and_the_others_go_on(tmp_path: Path) -> None:
    async with running(tmp_path, 1) as (supervisor, (process,), _):

        async def keep_alive() -> None:
            while True:
                await process.restart()

        keeper = asyncio.create_task(keep_alive())
        good = [asyncio.create_task(collect(supervisor, request(number))) for number in range(8)]
        await until(lambda: until_steps(supervisor, 5), "the streams are under way")
        with pytest.raises(RequestFailedError):
            await collect(supervisor, request(99, prompt=POISON))
        for number, task in enumerate(good):
            assert_undisturbed(await task, number)
        keeper.cancel()


async def test_random_closes_during_kills_leave_nothing_behind(tmp_path: Path) -> None:
    rng = random.Random(3)
    async with running(tmp_path, 2) as (supervisor, processes, pool):

        async def client(number: int) -> None:
            stream = supervisor.generate(request(number, count=200))
            patience = rng.randrange(200)
            async for output in stream:
                if output.offset > patience:
                    break
            await stream.aclose()

        tasks = [asyncio.create_task(client(number)) for number in range(200)]
        for process in processes:
            await until(lambda: until_steps(supervisor, 10), "work is done")
            process.signal(signal.SIGKILL)
            await process.restart()
        await asyncio.gather(*tasks)
        await until(lambda: all(target.engine.is_ready for target in pool.targets), "both engines are back")

        async def nothing_runs() -> bool:
            return (await supervisor.load()).running == 0

        await until(nothing_runs, "the engines have ended every request")
        assert supervisor.num_running == 0
        assert set(pool.in_flight.values()) == {0}
