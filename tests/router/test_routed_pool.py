"""The routed pool under the supervisor: engines that die on cue, targets that come and go, queues."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.errors import DeadlineError, EngineDiedError, LoadingError, PressureError
from engine.protocol import EngineLoad, GenerateRequest, SamplingParams, TokenOutput
from router.admission import AdmissionLimits
from router.attempts import Limits
from router.dispatcher import Dispatcher
from router.index import PrefixIndex
from router.policies.registry import make_policy
from router.routed_pool import RoutedPool
from router.supervisor import Supervisor
from tests.support.cue_engine import CueEngine, die, die_for_good, refuse
from tests.support.hashed_keys import note_hashed_keys
from tests.support.static_pool import StaticTarget
from tests.support.until import until

BLOCK = 16


class Fleet:
    """Targets t0, t1, ... in one routed pool, and a supervisor over it."""

    def __init__(self, *engines: CueEngine, policy: str = "prefix", **options: Any) -> None:  # noqa: ANN401
        rng = random.Random(1)
        dispatcher = Dispatcher(
            make_policy(policy, time.monotonic, rng), PrefixIndex(4096, time.monotonic), time.monotonic, rng
        )
        self.pool = RoutedPool(dispatcher, block_size=BLOCK, **options)
        self.engines = engines
        for number, engine in enumerate(engines):
            self.pool.add(StaticTarget(f"t{number}", engine))
        self.supervisor = Supervisor(self.pool, limits=Limits(first_pause_s=0.001, max_pause_s=0.002))

    async def collect(self, request: GenerateRequest) -> list[TokenOutput]:
        return [output async for output in self.supervisor.generate(request)]

    def measure(self) -> None:
        """Let t0 be known to compute 100 tokens/s."""
        for steps in (0, 1):
            load = EngineLoad(steps_total=steps, prefill_tokens_total=1000 * steps, prefill_busy_s_total=10.0 * steps)
            self.pool.report_load("t0", load)

    def assert_clean(self) -> None:
        assert set(self.pool.in_flight.values()) <= {0}
        assert (self.pool.admission.queued, self.pool.admission.unsettled_tokens) == (0, 0)
        self.pool.dispatcher.check_integrity()


def ask(request_id: str = "r", prompt: int = 40, count: int = 8, **fields: Any) -> GenerateRequest:  # noqa: ANN401
    sampling = SamplingParams(seed=1, max_tokens=count)
    return GenerateRequest(request_id=request_id, prompt_ids=list(range(prompt)), sampling=sampling, **fields)


async def test_a_stream_goes_on_elsewhere_and_the_log_tells_of_both_attempts() -> None:
    fleet = Fleet(CueEngine([(3, die)]), CueEngine([(3, die)]))
    outputs = await fleet.collect(ask())
    assert sum(len(output.token_ids) for output in outputs) == 8
    first, second = fleet.pool.decisions.find("r")[:2]
    assert first.target_id != second.target_id
    assert second.passed_over == {first.target_id: "excluded"}
    fleet.assert_clean()


async def test_the_same_prompt_goes_to_the_same_target() -> None:
    fleet = Fleet(*(CueEngine() for _ in range(4)))
    for number in range(5):
        await fleet.collect(ask(f"r{number}"))
    assert sorted(len(engine.seen) for engine in fleet.engines) == [0, 0, 0, 5]
    await fleet.collect(ask("other scope", cache_scope=bytes(32)))
    assert fleet.pool.decisions.find("other scope")[0].predicted_tokens == 0


async def test_what_waits_for_a_target_gets_the_one_that_is_added() -> None:
    fleet = Fleet(CueEngine())
    await fleet.collect(ask("first"))
    fleet.pool.set_state("t0", "dead")
    task = asyncio.create_task(fleet.collect(ask()))
    await asyncio.sleep(0)
    assert not task.done()
    fleet.pool.add(StaticTarget("t1", CueEngine()))
    assert sum(len(output.token_ids) for output in await task) == 8
    fleet.assert_clean()


async def test_what_waits_for_a_target_gets_the_one_that_turns_ready() -> None:
    fleet = Fleet(CueEngine())
    await fleet.collect(ask("first"))
    engine = fleet.engines[0]
    engine.is_ready = False
    task = asyncio.create_task(fleet.collect(ask()))
    await asyncio.sleep(0)
    engine.is_ready = True
    engine.ready_again.set()
    await task
    engine.acts = [(2, die_for_good)]
    engine.ready_again.clear()
    task = asyncio.create_task(fleet.collect(ask("dies")))
    await until(lambda: not engine.is_ready, "the engine died")
    engine.is_ready = True
    engine.ready_again.set()
    await task
    fleet.assert_clean()


class Looked(CueEngine):
    """Counts how often somebody looks whether it is ready."""

    def __init__(self) -> None:
        self.looks = 0
        super().__init__()

    @property
    def is_ready(self) -> bool:
        self.looks += 1
        return True

    @is_ready.setter
    def is_ready(self, ready: bool) -> None:
        assert ready


async def test_only_a_state_that_is_new_wakes_those_that_wait() -> None:
    engine = Looked()
    fleet = Fleet(engine)
    await fleet.collect(ask("first"))
    fleet.pool.set_state("t0", "draining")
    looks = engine.looks
    tasks = [asyncio.create_task(fleet.collect(ask(f"r{number}"))) for number in range(4)]
    await until(lambda: engine.looks == looks + 4, "they wait")
    for _ in range(50):
        fleet.pool.set_state("t0", "draining")
        fleet.pool.set_state("unknown", "ready")
        await asyncio.sleep(0)
    assert engine.looks == looks + 4, "nobody looked again"
    fleet.pool.set_state("t0", "ready")
    assert [sum(len(output.token_ids) for output in await task) for task in tasks] == [8] * 4
    fleet.assert_clean()


async def test_choices_of_one_prompt_are_routed_by_keys_that_were_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = note_hashed_keys(monkeypatch)
    fleet = Fleet(*(CueEngine() for _ in range(3)))
    for choice in range(5):
        await fleet.collect(ask(f"r-{choice}", prompt=40, group_id="r"))
    assert len(hashed) == 40 // BLOCK
    assert sorted(len(engine.seen) for engine in fleet.engines) == [0, 0, 5], "what was hashed once still counts"


async def test_without_a_ready_target_a_request_waits_until_its_deadline() -> None:
    fleet = Fleet(CueEngine())
    await fleet.collect(ask("first"))
    fleet.pool.set_state("t0", "draining")
    with pytest.raises(DeadlineError):
        await fleet.pool.choose(ask(deadline_unix_s=time.time() + 0.05), ())
    fleet.pool.remove("t0")
    with pytest.raises(DeadlineError):
        await fleet.pool.choose(ask(deadline_unix_s=time.time() + 0.05), ())
    fleet.assert_clean()


async def test_while_nothing_was_ever_ready_the_client_is_told() -> None:
    engine = CueEngine()
    engine.is_ready = False
    with pytest.raises(LoadingError):
        await Fleet(engine).pool.choose(ask(), ())
    with pytest.raises(LoadingError):
        await Fleet().pool.choose(ask(), ())


async def test_a_pool_whose_targets_all_refused_is_full() -> None:
    fleet = Fleet(*(CueEngine([(0, refuse(PressureError("full")))]) for _ in range(2)))
    with pytest.raises(PressureError):
        await fleet.collect(ask())
    assert fleet.pool.dispatcher.outcomes == {"pressure": 2}
    assert {one.breaker for one in fleet.pool.dispatcher.status()} == {"closed"}
    fleet.assert_clean()


async def test_a_queued_request_gets_its_turn_when_an_earlier_prompt_is_computed() -> None:
    fleet = Fleet(CueEngine(), admission_limits=AdmissionLimits(budget_s=1.0))
    fleet.measure()
    first = await fleet.pool.choose(ask("first", prompt=200), ())
    task = asyncio.create_task(fleet.pool.choose(ask("second", prompt=20), ()))
    await until(lambda: fleet.pool.admission.queued == 1, "the second waits")
    first.first_output(TokenOutput("first", 0, 0, [1]))
    fleet.pool.report_load("t0", EngineLoad(steps_total=2))
    second = await task
    first.release("ok")
    second.release("ok")
    fleet.assert_clean()


async def test_what_is_cached_takes_no_room() -> None:
    fleet = Fleet(CueEngine(), admission_limits=AdmissionLimits(budget_s=1.0))
    fleet.measure()
    warm = await fleet.pool.choose(ask("warm", prompt=960), ())
    warm.first_output(TokenOutput("warm", 0, 0, [1]))
    fleet.pool.report_load("t0", EngineLoad(steps_total=2))
    busy = await fleet.pool.choose(GenerateRequest(request_id="busy", prompt_ids=[7] * 60), ())
    again = await asyncio.wait_for(fleet.pool.choose(ask("again", prompt=960), ()), 60)
    unlike = GenerateRequest(request_id="unlike", prompt_ids=[9] * 960)
    waiting = asyncio.create_task(fleet.pool.choose(unlike, ()))
    await until(lambda: fleet.pool.admission.queued_tokens == 960, "what has to be computed waits")
    for lease in (warm, busy, again):
        lease.release("ok")
    (await waiting).release("ok")
    fleet.assert_clean()


async def test_a_client_that_leaves_the_queue_is_noticed() -> None:
    fleet = Fleet(CueEngine(), admission_limits=AdmissionLimits(budget_s=1.0))
    fleet.measure()
    first = await fleet.pool.choose(ask("first", prompt=200), ())
    tasks = [asyncio.create_task(fleet.pool.choose(ask(f"r{n}", prompt=200), ())) for n in range(3)]
    await until(lambda: fleet.pool.admission.queued == 3, "they wait")
    tasks[0].cancel()
    await until(lambda: fleet.pool.admission.queued == 2, "one left")
    with pytest.raises(DeadlineError):
        await fleet.pool.choose(ask("late", prompt=200, deadline_unix_s=time.time() + 0.02), ())
    assert fleet.pool.admission.shed == {"deadline": 1}
    for task in tasks[1:]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    first.release("cancelled")
    assert fleet.pool.admission.shed == {"deadline": 1}, "who leaves is not shed"
    fleet.assert_clean()


async def test_a_deadline_that_interrupts_a_queued_request_is_counted() -> None:
    fleet = Fleet(CueEngine(), admission_limits=AdmissionLimits(budget_s=1.0))
    fleet.measure()
    first = await fleet.pool.choose(ask("first", prompt=200), ())
    with pytest.raises(DeadlineError):
        await fleet.collect(ask("late", prompt=200, deadline_unix_s=time.time() + 0.02))
    assert fleet.pool.admission.shed == {"deadline": 1}
    first.release("ok")
    fleet.assert_clean()


async def test_who_waits_too_long_or_finds_the_queue_full_is_refused() -> None:
    limits = AdmissionLimits(budget_s=1.0, max_queued=1, max_wait_s=0.05)
    fleet = Fleet(CueEngine(), admission_limits=limits)
    fleet.measure()
    first = await fleet.pool.choose(ask("first", prompt=200), ())
    task = asyncio.create_task(fleet.pool.choose(ask("waits", prompt=200), ()))
    await asyncio.sleep(0)
    with pytest.raises(PressureError) as refused:
        await fleet.pool.choose(ask("too much", prompt=200), ())
    assert refused.value.retry_after_s >= 1
    assert str(refused.value) == "The queue is full."
    with pytest.raises(PressureError, match=r"waited 0\.05 s in the queue") as too_long:
        await task
    assert too_long.value.retry_after_s >= 1
    assert fleet.pool.admission.shed == {"queue_full": 1, "queue_timeout": 1}
    first.release("ok")
    fleet.assert_clean()


async def test_a_request_whose_attempt_failed_does_not_queue_again() -> None:
    fleet = Fleet(CueEngine(), CueEngine(), admission_limits=AdmissionLimits(budget_s=1.0))
    fleet.measure()
    lease = await fleet.pool.choose(ask("migrates", prompt=60), ())
    waiting = asyncio.create_task(fleet.pool.choose(ask("waits", prompt=1000), ()))
    await until(lambda: fleet.pool.admission.queued == 1, "it waits")
    lease.release("fault")
    again = await fleet.pool.choose(ask("migrates", prompt=1000), {lease.target.target_id})
    other = await waiting
    again.release("ok")
    other.release("ok")
    fleet.assert_clean()


class Coarse(CueEngine):
    """Dies now and then, before and between tokens."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        async for output in super().generate(request):
            if self.rng.random() < 0.03:
                raise EngineDiedError("killed")
            yield output


@pytest.mark.parametrize("policy", ["prefix", "session", "power_of_two"])
async def test_after_a_storm_of_deaths_and_disconnects_all_counters_are_zero(policy: str) -> None:
    fleet = Fleet(*(Coarse(seed) for seed in range(3)), policy=policy, admission_limits=AdmissionLimits(budget_s=2.0))
    fleet.measure()
    rng = random.Random(7)

    async def client(number: int) -> None:
        request = ask(
            f"r{number}", prompt=rng.randrange(1, 100), count=rng.randrange(1, 20), session_id=str(number % 5)
        )
        stream = fleet.supervisor.generate(request)
        patience = rng.randrange(1, 30)
        try:
            async for _ in stream:
                patience -= 1
                if not patience:
                    break
        except (PressureError, EngineDiedError):
            pass  # refused, or given up: both are ends
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    tasks = [asyncio.create_task(client(number)) for number in range(300)]
    for _ in tasks:
        await asyncio.sleep(0)
        if rng.random() < 0.2:
            rng.choice(tasks).cancel()
        fleet.pool.report_load("t0", EngineLoad(steps_total=2, queued_uncached_tokens=rng.randrange(300)))
    fleet.pool.report_load("t0", EngineLoad(steps_total=2))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    unexpected = [one for one in results if isinstance(one, Exception) and "given up" not in str(one)]
    assert unexpected == []
    fleet.assert_clean()
