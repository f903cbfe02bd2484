"""The supervisor over engines that fail on cue: what the client sees, what is tried, what is given up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import (
    DeadlineError,
    DrainingError,
    EngineDiedError,
    EngineError,
    EngineSilentError,
    LoadingError,
    PressureError,
    RequestError,
    RequestFailedError,
)
from engine.protocol import GenerateRequest, Lease, SamplingParams, TokenOutput
from engine.wire.merge import merge_outputs
from tests.support.cue_engine import Act, CueEngine, Stage, die, die_for_good, hang, refuse
from tests.support.scripted_engine import ASSET, scripted_token, scripted_tokens
from tests.support.static_pool import StaticPool, StaticTarget
from tests.support.until import until


def request(request_id: str = "r", seed: int | None = 1, count: int = 20, **fields: Any) -> GenerateRequest:  # noqa: ANN401
    sampling = SamplingParams(seed=seed, max_tokens=count)
    return GenerateRequest(request_id=request_id, prompt_ids=[1, 2], sampling=sampling, **fields)


def assert_whole(outputs: Sequence[TokenOutput], seed: int, count: int) -> None:
    position = outputs[0].offset
    for output in outputs:
        assert output.offset == position, "neither a gap nor a duplicate"
        position += len(output.token_ids)
    assert merge_outputs(outputs).token_ids == scripted_tokens(seed, count)[outputs[0].offset :]
    assert [output.finish_reason for output in outputs if output.finish_reason] == ["length"]


async def test_a_stream_goes_on_elsewhere_with_the_same_tokens() -> None:
    stage = Stage(CueEngine([(5, die)]), CueEngine())
    outputs = await stage.collect(request())
    assert_whole(outputs, 1, 20)
    (resumed,) = stage.engines[1].seen
    assert resumed.resume_ids == scripted_tokens(1, 5)
    assert (resumed.attempt, resumed.sampling.seed, resumed.prompt_ids) == (1, 1, [1, 2])
    assert stage.supervisor.counters == {"attempts": 2, "resumed": 1}
    assert stage.pool.outcomes == {"fault": 1, "ok": 1}
    stage.assert_clean()


@settings(max_examples=50)
@given(st.lists(st.integers(1, 6), max_size=8), st.integers(0, 5))
async def test_any_number_of_deaths_with_progress_between_them_leaves_no_trace(lives: list[int], resumed: int) -> None:
    stage = Stage(CueEngine([(count, die) for count in lives]))
    outputs = await stage.collect(request(count=60, resume_ids=scripted_tokens(1, resumed), attempt=3))
    assert outputs[0].offset == resumed
    assert {output.attempt for output in outputs} == {3}, "to its client it is one attempt"
    assert_whole(outputs, 1, 60)
    assert [seen.attempt for seen in stage.engines[0].seen] == list(range(3, 4 + len(lives)))
    stage.assert_clean()


async def test_usage_comes_from_the_first_attempt_that_answered() -> None:
    stage = Stage(CueEngine([(0, die), (3, die), (4, die)]))
    outputs = await stage.collect(request())
    assert [output.cached.total for output in outputs if output.cached is not None] == [64]
    assert outputs[0].cached is not None


async def test_a_seed_is_drawn_once_for_all_attempts() -> None:
    stage = Stage(CueEngine([(3, die), (3, die)]))
    await stage.collect(request(seed=None))
    seeds = {seen.sampling.seed for seen in stage.engines[0].seen}
    assert len(seeds) == 1
    assert None not in seeds
    await stage.collect(request(seed=None))
    assert stage.engines[0].seen[-1].sampling.seed not in seeds


async def test_before_the_first_token_a_fault_is_retried_elsewhere() -> None:
    stage = Stage(CueEngine([(0, die)]), CueEngine())
    assert_whole(await stage.collect(request()), 1, 20)
    assert stage.engines[1].seen[0].resume_ids == []
    assert stage.supervisor.counters["retried"] == 1


async def test_the_only_engine_is_waited_for_until_it_is_back() -> None:
    engine = CueEngine([(4, die_for_good)])
    stage = Stage(engine)
    task = asyncio.create_task(stage.collect(request()))
    await until(lambda: not engine.is_ready, "the engine died")
    assert not task.done()
    engine.is_ready = True
    engine.ready_again.set()
    assert_whole(await task, 1, 20)


async def test_a_request_that_kills_every_engine_is_given_up() -> None:
    stage = Stage(CueEngine([(0, die)] * 10), CueEngine([(0, die)] * 10))
    with pytest.raises(RequestFailedError, match="5 attempts"):
        await stage.collect(request())
    assert sum(len(engine.seen) for engine in stage.engines) == 5
    stage.assert_clean()


async def test_a_request_that_kills_engines_after_each_token_is_given_up_too() -> None:
    stage = Stage(CueEngine([(1, die)] * 100), faults=7)
    with pytest.raises(RequestFailedError, match="7 attempts"):
        await stage.collect(request(count=1000))
    stage.assert_clean()


async def test_a_killer_takes_no_innocent_request_with_it() -> None:
    """All requests of an engine see it die. Only the one that kills it may be given up."""

    class SharedFate(CueEngine):
        """Every request dies when the killer is there, before any has got a token."""

        deaths = 0

        async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
            death = self.deaths
            for _ in range(3):
                await asyncio.sleep(0)
                if request.request_id == "killer":
                    self.deaths += 1
                if self.deaths > death:
                    raise EngineDiedError("killed")
            async for output in super().generate(request):
                yield output
                if self.deaths > death:
                    raise EngineDiedError("killed")

    stage = Stage(SharedFate())
    names = ["a", "b", "killer", "c", "d"]
    results = await asyncio.gather(*(stage.collect(request(name)) for name in names), return_exceptions=True)
    for name, result in zip(names, results, strict=True):
        if name == "killer":
            assert isinstance(result, RequestFailedError)
        else:
            assert not isinstance(result, BaseException)
            assert_whole(result, 1, 20)
    stage.assert_clean()


async def test_pressure_is_no_fault_and_asks_the_next_target() -> None:
    full = PressureError("full", retry_after_s=7.0)
    stage = Stage(CueEngine([(0, refuse(full))]), CueEngine([(0, refuse(full))]), CueEngine())
    assert_whole(await stage.collect(request()), 1, 20)
    assert stage.pool.outcomes == {"pressure": 2, "ok": 1}
    assert stage.supervisor.counters == {"attempts": 3, "pressed": 2}


async def test_when_every_target_is_full_the_request_is_refused() -> None:
    stage = Stage(*(CueEngine([(0, refuse(PressureError("full", retry_after_s=7.0)))]) for _ in range(3)))
    with pytest.raises(PressureError):
        await stage.collect(request())
    assert [len(engine.seen) for engine in stage.engines] == [1, 1, 1]
    stage.assert_clean()


async def test_a_stream_that_has_started_waits_for_room() -> None:
    full = refuse(PressureError("full"))
    stage = Stage(CueEngine([(3, die), *[(0, full)] * 5]))
    assert_whole(await stage.collect(request()), 1, 20)
    stage = Stage(CueEngine([(3, die), *[(0, full)] * 100]), pressure_rounds=4)
    with pytest.raises(PressureError):
        await stage.collect(request())
    stage.assert_clean()


async def test_pressure_re_chooses_twice_at_most() -> None:
    stage = Stage(*(CueEngine([(0, refuse(PressureError("full")))]) for _ in range(4)), CueEngine())
    with pytest.raises(PressureError):
        await stage.collect(request())
    assert stage.supervisor.counters == {"attempts": 3, "pressed": 2}


async def test_any_number_of_draining_targets_is_passed_over() -> None:
    stage = Stage(*(CueEngine([(0, refuse(DrainingError("draining")))]) for _ in range(4)), CueEngine())
    assert_whole(await stage.collect(request()), 1, 20)


async def test_a_fault_that_is_no_death_is_tried_again_too() -> None:
    stage = Stage(CueEngine([(0, refuse(EngineError("no answer")))]), CueEngine())
    assert_whole(await stage.collect(request()), 1, 20)
    assert stage.supervisor.retry_budget.balance == 99


async def test_retries_after_deaths_cost_nothing() -> None:
    stage = Stage(CueEngine([(0, die)]), CueEngine([(0, die)]), CueEngine())
    before = stage.supervisor.retry_budget.balance
    assert_whole(await stage.collect(request()), 1, 20)
    assert stage.supervisor.retry_budget.balance == before


async def test_many_silences_give_no_request_up() -> None:
    silent = refuse(EngineSilentError("It has not answered."))
    stage = Stage(CueEngine([(0, silent)] * 7), CueEngine([(0, silent)] * 7))
    assert_whole(await stage.collect(request()), 1, 20)
    assert stage.supervisor.retry_budget.balance == 100
    stage.assert_clean()


async def test_whoever_is_back_first_is_asked_also_when_it_died_before() -> None:
    first, second = CueEngine([(5, die_for_good)]), CueEngine()
    stage = Stage(first, second)
    second.is_ready = False
    task = asyncio.create_task(stage.collect(request()))
    await first.at_its_act.wait()
    first.is_ready = True
    first.ready_again.set()
    assert_whole(await task, 1, 20)
    assert not second.seen
    stage.assert_clean()


async def test_without_budget_a_fault_is_told_and_a_started_stream_still_goes_on() -> None:
    broken = refuse(EngineError("no answer"))
    stage = Stage(CueEngine([(0, broken), (5, broken)]), CueEngine())
    while stage.supervisor.retry_budget.withdraw():
        continue
    with pytest.raises(PressureError):
        await stage.collect(request())
    assert_whole(await stage.collect(request()), 1, 20)
    stage.assert_clean()


async def test_the_lease_learns_of_each_attempts_first_output() -> None:
    stage = Stage(CueEngine([(3, die), (0, die)]))
    firsts: list[int] = []
    choose = stage.pool.choose

    async def watched(wanted: GenerateRequest, exclude: Collection[str]) -> Lease:
        lease = await choose(wanted, exclude)
        lease.first_output = lambda output: firsts.append(output.offset)  # type: ignore[method-assign]
        return lease

    stage.pool.choose = watched  # type: ignore[method-assign]
    await stage.collect(request())
    assert firsts == [0, 3]


async def test_a_draining_target_is_passed_over() -> None:
    stage = Stage(CueEngine([(0, refuse(DrainingError("draining")))]), CueEngine())
    assert_whole(await stage.collect(request()), 1, 20)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(RequestError("bad", param="top_p"), "client_error"), (RequestFailedError("this one"), "fault")],
)
async def test_what_is_the_requests_own_is_not_tried_again(error: Exception, outcome: str) -> None:
    stage = Stage(CueEngine([(2, refuse(error))]), CueEngine())
    with pytest.raises(type(error)) as caught:
        await stage.collect(request())
    assert caught.value is error
    assert stage.pool.outcomes == {outcome: 1}
    assert stage.engines[1].seen == []
    stage.assert_clean()


async def test_late_duplicates_are_dropped_and_a_hole_is_filled() -> None:
    class Repeating(CueEngine):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
            assert request.sampling.seed is not None
            at = len(request.resume_ids)

            def output(index: int, attempt: int = request.attempt) -> TokenOutput:
                return TokenOutput(request.request_id, attempt, index, [scripted_token(1, index)])

            yield output(at)
            yield output(at)
            yield output(at + 1, attempt=request.attempt - 1)
            yield output(at + 2)

    stage = Stage(Repeating(), faults=4)
    seen, error = await stage.collect_until_failure(request())
    assert isinstance(error, RequestFailedError)
    assert [output.offset for output in seen] == [0, 1, 2, 3]
    assert [output.token_ids[0] for output in seen] == scripted_tokens(1, 4)


async def test_a_stream_without_an_end_is_a_fault() -> None:
    class Endless(CueEngine):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
            return
            yield

    stage = Stage(Endless())
    with pytest.raises(RequestFailedError):
        await stage.collect(request())
    assert stage.pool.outcomes == {"fault": 5}


async def test_closing_the_stream_releases_everything() -> None:
    stage = Stage(CueEngine())
    stream = stage.supervisor.generate(request(count=1000))
    await anext(stream)
    assert stage.pool.in_flight == {"t0": 1}
    await stream.aclose()
    assert stage.pool.outcomes == {"cancelled": 1}
    stage.assert_clean()


async def test_closing_the_stream_behind_a_finish_is_a_good_end() -> None:
    stage = Stage(CueEngine())
    stream = stage.supervisor.generate(request(count=1000))
    await anext(stream)
    await stage.supervisor.finish("r", 1)
    await stream.aclose()
    assert stage.pool.outcomes == {"ok": 1}
    stage.assert_clean()


@pytest.mark.parametrize("act", [hang, die_for_good])
async def test_cancelling_the_consumer_releases_everything(act: Act) -> None:
    stage = Stage(CueEngine([(3, act)]))
    task = asyncio.create_task(stage.collect(request()))
    await stage.engines[0].at_its_act.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stage.assert_clean()


async def test_cancelling_after_a_finish_is_still_a_cancellation() -> None:
    stage = Stage(CueEngine([(3, hang)]))
    task = asyncio.create_task(stage.collect(request()))
    await until(lambda: len(stage.engines[0].seen) == 1, "it runs")
    await stage.supervisor.finish("r", 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stage.assert_clean()


@pytest.mark.parametrize("reason", ["stop", "abort"])
async def test_finish_and_abort_reach_the_current_attempt(reason: str) -> None:
    stage = Stage(CueEngine([(2, die)]), CueEngine())
    outputs = []
    async for output in stage.supervisor.generate(request(count=1000)):
        outputs.append(output)
        if output.offset == 4:
            await (stage.supervisor.finish("r", 3) if reason == "stop" else stage.supervisor.abort("r"))
    assert outputs[-1].finish_reason == reason
    assert stage.engines[1].finished == ([("r", 3)] if reason == "stop" else [])
    await stage.supervisor.finish("unknown", 0)
    await stage.supervisor.abort("unknown")
    stage.assert_clean()


@pytest.mark.parametrize("reason", ["stop", "abort"])
async def test_finish_and_abort_end_a_request_that_waits_for_an_engine(reason: str) -> None:
    engine = CueEngine([(4, die_for_good)])
    stage = Stage(engine)
    task = asyncio.create_task(stage.collect(request()))
    await until(lambda: stage.pool.outcomes["fault"] == 1, "the request waits for the engine to come back")
    await (stage.supervisor.finish("r", 4) if reason == "stop" else stage.supervisor.abort("r"))
    outputs = await task
    assert (outputs[-1].offset, outputs[-1].token_ids, outputs[-1].finish_reason) == (4, [], reason)
    assert len(engine.seen) == 1
    stage.assert_clean()


async def test_an_engine_that_dies_over_a_finish_is_not_replaced() -> None:
    async def die_when_finished(engine: CueEngine, _: GenerateRequest) -> None:
        await engine.end.wait()
        raise EngineDiedError("killed")

    stage = Stage(CueEngine([(3, die_when_finished)]), CueEngine())
    stream = stage.supervisor.generate(request())
    outputs = [await anext(stream) for _ in range(3)]
    pending = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await stage.supervisor.finish("r", 3)
    outputs.append(await pending)
    assert (outputs[-1].finish_reason, outputs[-1].offset) == ("stop", 3)
    assert [output async for output in stream] == []
    assert stage.engines[1].seen == []
    stage.assert_clean()


@pytest.mark.parametrize("act", [hang, die_for_good], ids=["stuck engine", "no engine"])
async def test_the_deadline_ends_a_request_whatever_it_waits_for(act: Act) -> None:
    stage = Stage(CueEngine([(2, act)]))
    seen, error = await stage.collect_until_failure(request(deadline_unix_s=time.time() + 0.1))
    assert isinstance(error, DeadlineError)
    assert len(seen) == 2
    stage.assert_clean()


async def test_a_deadline_that_passes_while_the_consumer_works_ends_the_next_wait() -> None:
    stage = Stage(CueEngine())
    late = request(count=1000, deadline_unix_s=time.time() + 0.05)
    _, error = await stage.collect_until_failure(late, pause_s=0.1)
    assert isinstance(error, DeadlineError)
    stage.assert_clean()


async def test_the_engines_own_deadline_is_told_the_same_way() -> None:
    class Late(CueEngine):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
            yield TokenOutput("r", request.attempt, 0, [], "abort", error="late", error_code="deadline_exceeded")

    with pytest.raises(DeadlineError):
        await Stage(Late()).collect(request())


async def test_a_model_that_was_never_there_is_said_to_be_loading() -> None:
    engine = CueEngine()
    engine.is_ready = False
    with pytest.raises(LoadingError) as caught:
        await Stage(engine).collect(request())
    assert caught.value.progress == 0.5


async def test_the_least_busy_target_is_taken() -> None:
    stage = Stage(*(CueEngine() for _ in range(3)))
    streams = [stage.supervisor.generate(request(f"r{n}", count=1000)) for n in range(9)]
    for stream in streams:
        await anext(stream)
    assert stage.pool.in_flight == {"t0": 3, "t1": 3, "t2": 3}
    for stream in streams:
        await stream.aclose()
    stage.assert_clean()


async def test_no_engine_within_the_patience_is_pressure() -> None:
    engine = CueEngine()
    pool = StaticPool([StaticTarget("t", engine)], patience_s=0.01)
    (await pool.choose(request(), ())).release("ok")
    engine.is_ready = False
    with pytest.raises(PressureError):
        await pool.choose(request(), ())
    with pytest.raises(DeadlineError):
        await pool.choose(request(deadline_unix_s=time.time() + 0.01), ())
    with pytest.raises(PressureError):
        await pool.choose(request(), {"t"})


async def test_a_lease_counts_once() -> None:
    pool = StaticPool([StaticTarget("t", CueEngine())])
    lease = await pool.choose(request(), ())
    lease.release("ok")
    lease.release("fault")
    assert pool.in_flight == {"t": 0}
    assert pool.outcomes == {"ok": 1}


async def test_several_engines_answer_as_one() -> None:
    stage = Stage(CueEngine(), CueEngine())
    assert (await stage.supervisor.load()).requests_total == {"length": 4}
    await stage.engines[0].drain()
    assert (await stage.supervisor.load()).requests_total == {"length": 2}
    assert (await stage.supervisor.describe()).architecture == "scripted"
    assert await stage.supervisor.fetch_asset("0") == ASSET
    await stage.supervisor.drain()
    with pytest.raises(LoadingError):
        await stage.supervisor.describe()
    with pytest.raises(EngineDiedError):
        await stage.supervisor.load()
