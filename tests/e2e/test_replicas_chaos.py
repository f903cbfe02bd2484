"""Engines that are killed, stopped, stuck, drained and restarted under load: clients never notice.

Each answer is compared with that of an undisturbed server, to the last digit of its logprobs and the counts of its
usage. The short tests do each harm once or twice, the soaks for two minutes.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.answers import Question
from tests.support.chaos import (
    LIMIT_S,
    Crowd,
    every,
    first_answers,
    kill_one,
    mixed_questions,
    send,
    strict_client,
    wait_nothing_left,
    wait_replaced,
    wait_serving,
)
from tests.support.headrace_server import HeadraceServer, headrace
from tests.support.holdable import HOLD, LET_GO
from tests.support.until import until

HOLDABLE = "tests.support.holdable"
TINY = {"dtype": "float32", "block_size": 16, "max_step_tokens": 256, "max_running": 64, "kv_cache_memory": "8MiB"}
SMOLLM2 = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory": "128MiB", "stall_timeout": "10s"}
HOLDS = [(HOLD, LET_GO), (signal.SIGSTOP, signal.SIGCONT)]

GIVEN_UP = "has not answered"

Report = Callable[[str], None]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    def tell(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}", end="")

    return tell


@asynccontextmanager
async def crowd_on(
    directory: Path, model: str, questions: list[Question], replicas: int, *, may_break: bool = False, **flags: object
) -> AsyncIterator[tuple[HeadraceServer, Crowd]]:
    """A server that has answered every question once, and the crowd that goes on asking while the block runs.

    Afterwards nothing may be left in flight."""
    flags = {"numerics": "invariant", "threads": 1, "stall_timeout": "1s", "drain_timeout": "120s", **flags}
    with headrace(directory, model, core_module=HOLDABLE, replicas=replicas, **flags) as server:
        await server.wait_ready()
        await wait_serving(server, replicas)
        async with strict_client(server, allow_503=may_break) as client:
            crowd = Crowd(client, questions, await first_answers(client, questions), may_break)
            async with crowd.asking():
                yield server, crowd
        await wait_nothing_left(server, replicas)


def tiny_questions(model: Path, count: int = 16) -> list[Question]:
    return mixed_questions(str(model), count=count, tokens=60)


def smollm2_questions() -> list[Question]:
    return mixed_questions("smollm2", count=8, tokens=24)


@pytest.mark.parametrize("replicas", [2, 1])
async def test_killed_engines_break_nothing(tiny_model: Path, tmp_path: Path, replicas: int) -> None:
    rng = random.Random(1)
    questions = tiny_questions(tiny_model)
    async with crowd_on(tmp_path, str(tiny_model), questions, replicas, **TINY) as (server, crowd):
        for _ in range(2):
            await crowd.wait_answers(len(questions) // 2)
            await wait_replaced(server, await kill_one(server, rng), replicas)
        await crowd.wait_answers(len(questions))
    assert server.text.count("signal SIGKILL") == 2


async def test_engines_that_fall_silent_break_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """One whose loop is stuck and whose heartbeats go on, and one whose process is stopped."""
    questions = tiny_questions(tiny_model)
    async with crowd_on(tmp_path, str(tiny_model), questions, 2, **TINY) as (server, crowd):
        for core, (hold, wake) in zip(server.cores, HOLDS, strict=True):
            await crowd.wait_answers(len(questions) // 2)
            told_before = server.text.count(GIVEN_UP)
            send(core, hold)
            await wait_told(server, GIVEN_UP, told_before + 1)
            await crowd.wait_answers(len(questions))
            send(core, wake)
            await wait_serving(server, 2)


async def test_the_only_engine_may_fall_silent(tiny_model: Path, tmp_path: Path) -> None:
    questions = tiny_questions(tiny_model)
    async with crowd_on(tmp_path, str(tiny_model), questions, 1, **TINY) as (server, crowd):
        for hold, wake in HOLDS:
            await crowd.wait_answers(len(questions) // 2)
            send(server.core, hold)
            await asyncio.sleep(0.5)  # the harm is how long it lasts: nothing is expected to have happened
            send(server.core, wake)
        await crowd.wait_answers(len(questions))
        core = server.core
        send(core, HOLD)
        send(core, signal.SIGKILL)
        await wait_replaced(server, core, 1)


@pytest.mark.parametrize("harm", [hold for hold, _ in HOLDS], ids=["stuck", "stopped"])
async def test_an_engine_that_stays_silent_is_replaced(tiny_model: Path, tmp_path: Path, harm: signal.Signals) -> None:
    questions = tiny_questions(tiny_model)
    flags = {**TINY, "core_unready_after": "1s", "core_restart_after": "3s"}
    async with crowd_on(tmp_path, str(tiny_model), questions, 1, **flags) as (server, crowd):
        await crowd.wait_answers(len(questions) // 2)
        core = server.core
        send(core, signal.SIGSTOP)

        async def is_unready() -> bool:
            return (await server.get("/ready"))[0] == 503

        await until(is_unready, "the server is not ready", limit_s=LIMIT_S)
        await wait_replaced(server, core, 1)
        await wait_ready(server)
        await crowd.wait_answers(len(questions))


async def test_engines_are_restarted_by_drain_one_after_the_other(tiny_model: Path, tmp_path: Path) -> None:
    questions = tiny_questions(tiny_model)
    async with crowd_on(tmp_path, str(tiny_model), questions, 2, **TINY) as (server, crowd):
        for core in server.cores:
            await crowd.wait_answers(len(questions) // 2)
            send(core, signal.SIGTERM)
            await wait_replaced(server, core, 2)
        await crowd.wait_answers(len(questions))
    assert server.text.count("ended with exit code 0") == 2, "each has drained and gone by itself"


async def test_new_requests_are_answered_after_a_restart_of_what_routes(tiny_model: Path, tmp_path: Path) -> None:
    questions = tiny_questions(tiny_model)
    flags = {**TINY, "api_processes": 2}
    async with crowd_on(tmp_path, str(tiny_model), questions, 2, may_break=True, **flags) as (server, crowd):
        await crowd.wait_answers(len(questions) // 2)
        await kill_apis(server)
        await crowd.wait_answers(2 * len(questions))
    assert crowd.cut > 0


async def wait_told(server: HeadraceServer, words: str, times: int) -> None:
    await until(lambda: server.text.count(words) >= times, f"the log has {words!r}", limit_s=LIMIT_S)


async def kill_apis(server: HeadraceServer) -> None:
    """Kill all API processes; return when as many others are there."""
    old = server.apis
    for api in old:
        send(api, signal.SIGKILL)
    pids = {api.pid for api in old}

    def are_replaced() -> bool:
        return len({api.pid for api in server.apis} - pids) == len(pids)

    await until(are_replaced, "others are in their place", limit_s=LIMIT_S)
    await wait_ready(server)


async def wait_ready(server: HeadraceServer) -> None:
    async def answers() -> bool:
        try:
            return (await server.get("/ready"))[0] == 200
        except (OSError, AssertionError):  # it went with the connection in its backlog
            return False

    await until(answers, "the server answers again", limit_s=LIMIT_S)


# --- The same for minutes -------------------------------------------------------------------------------------------

SOAK_S = 120.0
STREAMS = 64


def told(name: str, crowd: Crowd, times: int) -> str:
    return f"{name}: {times} times, {dict(crowd.answered)} answers, {crowd.cut} cut, longest {crowd.longest_s:.1f} s"


@pytest.mark.soak
@pytest.mark.parametrize("replicas", [2, 1])
async def test_soak_a_kill_every_5_s(tiny_model: Path, tmp_path: Path, replicas: int, report: Report) -> None:
    rng = random.Random(2)
    questions = tiny_questions(tiny_model, STREAMS)
    async with crowd_on(tmp_path, str(tiny_model), questions, replicas, **TINY) as (server, crowd):
        times = await every(5.0, SOAK_S, lambda: kill_one(server, rng))
    report(told(f"killed, {replicas} engines", crowd, times))


@pytest.mark.soak
@pytest.mark.parametrize("replicas", [2, 1])
async def test_soak_a_model_of_some_size_is_killed_10_s_after_it_is_ready(
    tmp_path: Path, replicas: int, report: Report
) -> None:
    rng = random.Random(3)
    async with crowd_on(tmp_path, "smollm2", smollm2_questions(), replicas, **SMOLLM2) as (server, crowd):

        async def kill_after_10_s() -> None:
            await wait_replaced(server, await kill_one(server, rng), replicas)

        times = await every(10.0, SOAK_S, kill_after_10_s)
    report(told(f"smollm2 killed, {replicas} engines", crowd, times))


@pytest.mark.soak
@pytest.mark.parametrize("replicas", [2, 1])
@pytest.mark.parametrize(("hold", "wake"), HOLDS, ids=["stuck", "stopped"])
async def test_soak_engines_fall_silent(
    tiny_model: Path, tmp_path: Path, hold: signal.Signals, wake: signal.Signals, replicas: int, report: Report
) -> None:
    """For up to 20 s: longer than heartbeats may be missed."""
    rng = random.Random(4)
    questions = tiny_questions(tiny_model, STREAMS)
    async with crowd_on(tmp_path, str(tiny_model), questions, replicas, **TINY) as (server, crowd):

        async def fall_silent() -> None:
            core = rng.choice(server.cores)
            send(core, hold)
            await asyncio.sleep(rng.choice((0.5, 3.0, 20.0)))
            send(core, wake)

        times = await every(2.0, SOAK_S, fall_silent)
    report(told(f"{hold.name}, {replicas} engines", crowd, times))


@pytest.mark.soak
async def test_soak_rolling_restart(tiny_model: Path, tmp_path: Path, report: Report) -> None:
    questions = tiny_questions(tiny_model, STREAMS)
    async with crowd_on(tmp_path, str(tiny_model), questions, 2, **TINY) as (server, crowd):

        async def restart_all() -> None:
            for core in server.cores:
                send(core, signal.SIGTERM)
                await wait_replaced(server, core, 2)

        times = await every(1.0, SOAK_S, restart_all)
    report(told("drained, all engines", crowd, times))


@pytest.mark.soak
async def test_soak_restarts_of_what_routes(tiny_model: Path, tmp_path: Path, report: Report) -> None:
    questions = tiny_questions(tiny_model, STREAMS)
    flags = {**TINY, "api_processes": 2}
    async with crowd_on(tmp_path, str(tiny_model), questions, 2, may_break=True, **flags) as (server, crowd):
        times = await every(10.0, SOAK_S, lambda: kill_apis(server))
    report(told("API processes killed", crowd, times))
