"""Two targets race for a request: who answers first goes on, and nothing of the other is left."""

from __future__ import annotations

import asyncio

import pytest

from engine.errors import EngineDiedError, PressureError, RequestError, RequestFailedError
from engine.protocol import GenerateRequest, SamplingParams, TokenOutput
from tests.support.cue_engine import CueEngine, Stage, die, hang, refuse
from tests.support.scripted_engine import scripted_tokens
from tests.support.until import until


def request(count: int = 20) -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt_ids=[1], sampling=SamplingParams(seed=1, max_tokens=count))


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def test_a_slow_target_is_overtaken() -> None:
    stage = Stage(CueEngine([(0, hang)]), CueEngine(), hedge_after_s=0.001)
    assert tokens(await stage.collect(request())) == scripted_tokens(1, 20)
    assert stage.pool.outcomes == {"cancelled": 1, "ok": 1}
    assert stage.supervisor.counters == {"attempts": 1}
    stage.assert_clean()


async def test_a_target_that_answers_in_time_races_nobody() -> None:
    stage = Stage(CueEngine(), CueEngine(), hedge_after_s=60.0)
    assert tokens(await stage.collect(request())) == scripted_tokens(1, 20)
    assert [len(engine.seen) for engine in stage.engines] == [1, 0]
    stage.assert_clean()


async def test_without_a_second_target_the_first_is_waited_for() -> None:
    async def answer_later(engine: CueEngine, _: GenerateRequest) -> None:
        await engine.end.wait()

    stage = Stage(CueEngine([(0, answer_later)]), hedge_after_s=0.001)
    task = asyncio.create_task(stage.collect(request()))
    await stage.engines[0].at_its_act.wait()
    stage.engines[0].end.set()
    assert tokens(await task) == scripted_tokens(1, 20)
    stage.assert_clean()


async def test_a_second_that_is_full_leaves_the_first_alone() -> None:
    async def answer_when_second_was_asked(engine: CueEngine, _: GenerateRequest) -> None:
        await until(lambda: bool(stage.engines[1].seen) and not stage.engines[1].live, "the second has refused")

    stage = Stage(
        CueEngine([(0, answer_when_second_was_asked)]),
        CueEngine([(0, refuse(PressureError("full")))]),
        hedge_after_s=0.001,
    )
    assert tokens(await stage.collect(request())) == scripted_tokens(1, 20)
    assert stage.pool.outcomes == {"ok": 1, "pressure": 1}
    stage.assert_clean()


async def test_a_death_behind_the_race_resumes_as_ever() -> None:
    stage = Stage(CueEngine([(0, hang)]), CueEngine([(5, die)]), CueEngine(), hedge_after_s=0.001)
    assert tokens(await stage.collect(request())) == scripted_tokens(1, 20)
    assert stage.supervisor.counters["resumed"] == 1
    stage.assert_clean()


async def test_when_both_die_a_third_attempt_follows() -> None:
    async def die_once_both_run(engine: CueEngine, _: GenerateRequest) -> None:
        await until(lambda: all(other.seen for other in stage.engines), "both were asked")
        raise EngineDiedError("killed")

    stage = Stage(CueEngine([(0, die_once_both_run)]), CueEngine([(0, die_once_both_run)]), hedge_after_s=0.001)
    assert tokens(await stage.collect(request())) == scripted_tokens(1, 20)
    assert stage.pool.outcomes["fault"] == 2
    stage.assert_clean()


async def test_the_requests_own_error_ends_it() -> None:
    stage = Stage(CueEngine([(0, refuse(RequestError("bad", param="top_p")))]), CueEngine(), hedge_after_s=60.0)
    with pytest.raises(RequestError):
        await stage.collect(request())
    assert stage.pool.outcomes == {"client_error": 1}
    stage = Stage(CueEngine([(0, refuse(RequestFailedError("this one")))]), CueEngine(), hedge_after_s=60.0)
    with pytest.raises(RequestFailedError):
        await stage.collect(request())
    stage.assert_clean()


@pytest.mark.parametrize("cut", ["in the race", "behind it"])
async def test_a_client_that_leaves_takes_both_attempts_along(cut: str) -> None:
    second = CueEngine([(0, hang)] if cut == "in the race" else [(3, hang)])
    stage = Stage(CueEngine([(0, hang)]), second, hedge_after_s=0.001)
    task = asyncio.create_task(stage.collect(request(1000)))
    await second.at_its_act.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stage.assert_clean()


@pytest.mark.parametrize("reason", ["stop", "abort"])
async def test_an_end_reaches_both_attempts(reason: str) -> None:
    async def wait_for_end(engine: CueEngine, _: GenerateRequest) -> None:
        await engine.end.wait()

    stage = Stage(CueEngine([(0, wait_for_end)]), CueEngine([(0, wait_for_end)]), hedge_after_s=0.001)
    task = asyncio.create_task(stage.collect(request()))
    await stage.engines[1].at_its_act.wait()
    await (stage.supervisor.finish("r", 0) if reason == "stop" else stage.supervisor.abort("r"))
    assert (await task)[-1].finish_reason == reason
    assert all(engine.ended_as == reason for engine in stage.engines)
    stage.assert_clean()
