"""Lives of requests: endings, limits, deadlines, errors."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import DrainingError, PressureError, PromptTooLongError, RequestError
from engine.protocol import CachedTokens, Grammar
from engine.request import Request
from tests.support.core_world import EOS_ID, World, make_request
from tests.support.fake_runner import expected_output


def seed_that_ends(world: World, at: int, **fields: object) -> int:
    """Return a seed whose output reaches its end token as token number `at` (from 1)."""
    for seed in range(20_000):
        request = make_request(seed=seed, **fields)  # type: ignore[arg-type]
        tokens, reason = expected_output(request, seed, vocab_size=50, eos_ids=(EOS_ID,), window=world.window)
        if reason == "stop" and len(tokens) == at:
            return seed
    raise AssertionError("no such seed")


def test_an_end_token_stops_and_is_named() -> None:
    world = World()
    attempt = world.submit(make_request(seed=seed_that_ends(world, 3), max_tokens=50))
    world.run()
    last = attempt.outputs[-1]
    assert (last.finish_reason, last.stop_token, last.token_ids) == ("stop", EOS_ID, [EOS_ID])


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_a_request_with_a_grammar_has_a_row_in_every_step(in_flight: int) -> None:
    """Its forward pass waits for no token: only the step's choice does."""
    world = World(in_flight=in_flight, grammars_late=0)
    world.runner.plans = []
    attempt = world.submit(make_request(max_tokens=30, grammar=Grammar("regex", "4"), ignore_eos=True))
    other = world.submit(make_request("other", max_tokens=30, ignore_eos=True))
    world.run()
    assert len(attempt.emitted) > 3
    constrained = [plan for plan in world.runner.plans if plan.num_masks]
    assert len(attempt.emitted) <= len(constrained) < len(attempt.emitted) + in_flight
    steps = [plan.step for plan in constrained]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert other.finish_reason == "length"


def test_an_end_token_wins_on_the_last_allowed_token() -> None:
    world = World()
    attempt = world.submit(make_request(seed=seed_that_ends(world, 3, max_tokens=3), max_tokens=3))
    world.run()
    assert attempt.finish_reason == "stop"


def test_ignore_eos_ignores_the_models_end_tokens_and_not_the_users() -> None:
    world = World()
    seed = seed_that_ends(world, 3, max_tokens=5)
    ignoring = world.submit(make_request("a", seed=seed, max_tokens=5, ignore_eos=True))
    user = world.submit(make_request("b", seed=seed, max_tokens=5, ignore_eos=True, stop_token_ids=(EOS_ID,)))
    world.run()
    assert ignoring.finish_reason == "length"
    assert user.finish_reason == "stop"


def test_min_tokens_forbids_end_tokens_until_then() -> None:
    world = World()
    seed = seed_that_ends(world, 3, max_tokens=6)
    attempt = world.submit(make_request(seed=seed, max_tokens=6, min_tokens=4))
    plain = world.submit(make_request("plain", seed=seed, max_tokens=6))
    world.run()
    assert EOS_ID not in attempt.emitted[:4]
    assert len(attempt.emitted) >= 4
    assert len(plain.emitted) == 3


@pytest.mark.parametrize(
    ("min_tokens", "tokens", "reason"), [(0, [0], "stop"), (1, [0, 5, 0], "stop"), (4, [0] * 4, "length")]
)
def test_min_tokens_gates_the_stop_decision_whatever_the_sampler_does(
    min_tokens: int, tokens: list[int], reason: str
) -> None:
    spec = make_request(max_tokens=4, min_tokens=min_tokens)
    request = Request(spec, arrival=0, arrived_s=0.0, max_total_tokens=7, eos_ids=(EOS_ID,), block_size=4)
    reasons = [request.extend((token,)) for token in tokens]
    assert reasons == [None] * (len(tokens) - 1) + [reason]


def test_tokens_accepted_behind_the_end_are_dropped() -> None:
    spec = make_request(max_tokens=9)
    request = Request(spec, arrival=0, arrived_s=0.0, max_total_tokens=12, eos_ids=(EOS_ID,), block_size=4)
    assert request.extend((4, 5, EOS_ID, 6)) == "stop"
    assert list(request.tokens) == [1, 2, 3, 4, 5, EOS_ID]


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_steps_in_flight_behind_the_end_are_discarded(in_flight: int) -> None:
    world = World(in_flight=in_flight, max_late=2)
    attempt = world.submit(make_request(seed=seed_that_ends(world, 4), max_tokens=50))
    world.run()
    assert len(attempt.emitted) == 4
    assert world.runner.rows_computed >= 4


@pytest.mark.parametrize("in_flight", [1, 4])
def test_nothing_is_scheduled_beyond_max_tokens(in_flight: int) -> None:
    world = World(in_flight=in_flight, max_late=3)
    world.submit(make_request(max_tokens=5, ignore_eos=True))
    world.run()
    assert world.runner.rows_computed == 5


def test_the_window_ends_a_request_by_length() -> None:
    world = World(max_model_len=20)
    attempt = world.submit(make_request(prompt=[1] * 12, ignore_eos=True))
    world.run()
    assert len(attempt.emitted) == 8
    assert attempt.finish_reason == "length"


def test_resumed_tokens_stay_output_tokens() -> None:
    world = World()
    whole = world.submit(make_request("whole", prompt=range(1, 11), max_tokens=12, ignore_eos=True))
    world.run()
    resumed = world.submit(
        make_request(
            "resumed", prompt=range(1, 11), max_tokens=12, ignore_eos=True, resume_ids=whole.emitted[:5], attempt=1
        )
    )
    world.run()
    assert resumed.outputs[0].offset == 5
    assert resumed.emitted == whole.emitted
    assert resumed.outputs[0].cached is not None
    assert resumed.outputs[0].cached.total <= 10


def test_a_missing_seed_is_drawn_and_kept() -> None:
    world = World(check=False)
    for name in "ab":
        world.core.submit(make_request(name, seed=None, max_tokens=2, temperature=1.0))
    seeds = [request.spec.sampling.seed for request in world.core._requests.values()]
    assert len(set(seeds)) == 2
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    while world.core.has_work:
        world.core.step()


@pytest.mark.parametrize("in_flight", [1, 4])
def test_abort_at_every_step_gives_one_terminal_output_and_all_blocks_back(in_flight: int) -> None:
    for steps in range(12):
        world = World(max_step_tokens=4, in_flight=in_flight, max_late=3)
        attempt = world.submit(make_request(prompt=range(1, 14), max_tokens=30, ignore_eos=True))
        for _ in range(steps):
            world.step()
        world.core.abort("r")
        world.check()
        world.run()
        assert attempt.finish_reason == "abort"


def test_abort_ends_within_the_next_step() -> None:
    world = World()
    world.submit(make_request(max_tokens=30, ignore_eos=True))
    world.step()
    world.core.abort("r")
    assert [output.finish_reason for output in world.step()] == ["abort"]
    assert not world.core.has_work


def test_unknown_ids_are_ignored() -> None:
    world = World()
    world.core.abort("nobody")
    world.core.finish("nobody", 3)
    assert world.step() == []


def test_finish_keeps_overshoot_out_of_what_is_saved() -> None:
    world = World(with_port=True, port_hold=0.0, block_size=4)
    assert world.port is not None
    kept: list[int] = []
    ask = world.port.on_finish

    def on_finish(request_id: str, keep_tokens: int) -> object:
        kept.append(keep_tokens)
        return ask(request_id, keep_tokens)

    world.port.on_finish = on_finish  # type: ignore[method-assign, assignment]
    attempt = world.submit(make_request(prompt=range(1, 7), max_tokens=30, ignore_eos=True))
    while len(attempt.emitted) < 8:
        world.step()
    world.core.finish("r", 5)
    world.run()
    assert kept == [11]
    assert attempt.outputs[-1].finish_reason == "stop"
    assert attempt.outputs[-1].token_ids == []


def test_a_deadline_ends_running_and_waiting_requests() -> None:
    world = World(max_running=1)
    running = world.submit(make_request("a", max_tokens=90, ignore_eos=True, deadline_unix_s=world.now_s + 1))
    waiting = world.submit(make_request("b", max_tokens=90, ignore_eos=True, deadline_unix_s=world.now_s + 1))
    later = world.submit(make_request("c", max_tokens=2, ignore_eos=True, deadline_unix_s=world.now_s + 100))
    world.step()
    world.now_s += 2
    world.run()
    for attempt in (running, waiting):
        assert (attempt.finish_reason, attempt.outputs[-1].error_code) == ("abort", "deadline_exceeded")
    assert later.finish_reason == "length"


def test_a_wall_clock_that_is_set_ends_nothing_and_keeps_nothing_going() -> None:
    world = World()
    early = world.submit(make_request("a", max_tokens=90, ignore_eos=True, deadline_unix_s=world.now_s + 1))
    late = world.submit(make_request("b", max_tokens=30, ignore_eos=True, deadline_unix_s=world.now_s + 100))
    world.step()
    world.wall_ahead_s = 3600.0
    for _ in range(10):
        world.step()
    assert (early.finish_reason, late.finish_reason) == (None, None)
    world.wall_ahead_s = -3600.0
    world.now_s += 2
    world.run()
    assert early.outputs[-1].error_code == "deadline_exceeded"
    assert late.finish_reason == "length"


def test_deadlines_of_ended_requests_are_not_kept_for_ever() -> None:
    world = World(check=False)
    for number in range(1000):
        world.submit(make_request(f"r{number}", max_tokens=1, deadline_unix_s=world.now_s + 1e9))
        world.step()
    assert len(world.core._deadlines) < 100


def test_an_error_of_one_row_ends_that_request_alone() -> None:
    world = World(row_error=1.0)
    bad = world.submit(make_request("bad", max_tokens=3))
    world.step()
    world.runner._row_error = 0.0
    good = world.submit(make_request("good", max_tokens=3, ignore_eos=True))
    world.run()
    assert (bad.finish_reason, bad.outputs[-1].error_code) == ("error", "request_failed")
    assert bad.outputs[-1].error
    assert good.finish_reason == "length"


def test_a_full_queue_is_pressure_and_changes_nothing() -> None:
    world = World(max_running=1, max_waiting=2)
    world.submit(make_request("a", max_tokens=50, ignore_eos=True))
    world.step()
    world.submit(make_request("b", max_tokens=1))
    world.submit(make_request("c", max_tokens=1))
    with pytest.raises(PressureError):
        world.submit(make_request("d", max_tokens=1))
    with pytest.raises(RequestError):  # a bad request is bad first
        world.submit(make_request("e", max_tokens=-1))
    world.run()
    assert len(world.attempts) == 3


def test_draining_takes_nothing_new_and_finishes_what_it_has() -> None:
    world = World(max_running=1)
    attempts = [world.submit(make_request(name, max_tokens=3, ignore_eos=True)) for name in "ab"]
    world.core.drain()
    with pytest.raises(DrainingError):
        world.submit(make_request("c"))
    assert world.core.load().draining
    world.run()
    assert [attempt.finish_reason for attempt in attempts] == ["length", "length"]


def test_what_cannot_fit_alone_is_refused() -> None:
    world = World(num_blocks=[6], block_size=4)
    with pytest.raises(PromptTooLongError) as caught:
        world.submit(make_request(prompt=[1] * 20))
    assert caught.value.max_model_len == 20
    attempt = world.submit(make_request(prompt=[1] * 19, ignore_eos=True))
    world.run()
    assert len(attempt.emitted) == 1


def test_an_id_in_use_is_refused_and_a_later_attempt_takes_over() -> None:
    world = World(in_flight=2, max_late=2)
    first = world.submit(make_request(max_tokens=30, ignore_eos=True))
    with pytest.raises(RequestError) as caught:
        world.submit(make_request(max_tokens=5))
    assert caught.value.param == "request_id"
    for _ in range(6):
        world.step()
    second = world.submit(make_request(max_tokens=30, ignore_eos=True, attempt=1, resume_ids=first.emitted))
    world.run()
    assert (first.finish_reason, second.finish_reason) == ("abort", "length")
    assert second.emitted[: len(first.emitted)] == first.emitted


def test_an_id_may_be_used_again_after_its_end() -> None:
    world = World()
    for _ in range(2):
        world.submit(make_request(max_tokens=2))
        world.run()
        world.attempts.clear()


@pytest.mark.parametrize("max_step_tokens", [1, 3, 8, 64])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_prompt_logprobs_are_complete_for_any_chunk_and_never_from_the_cache(
    max_step_tokens: int, in_flight: int
) -> None:
    world = World(max_step_tokens=max_step_tokens, in_flight=in_flight)
    world.submit(make_request("warm", prompt=range(1, 21), max_tokens=2))
    world.run()
    attempt = world.submit(make_request("asks", prompt=range(1, 21), max_tokens=2, prompt_logprobs=1))
    world.run()
    first = attempt.outputs[0]
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 20
    assert first.cached == CachedTokens()
    assert all(output.prompt_logprobs is None for output in attempt.outputs[1:])


def test_prompt_logprobs_survive_preemption_of_the_prompt() -> None:
    world = World(num_blocks=[11], block_size=4, max_step_tokens=8)
    world.submit(make_request("old", prompt=range(1, 9), max_tokens=30, ignore_eos=True))
    world.step()
    asks = world.submit(make_request("asks", prompt=range(5, 36), max_tokens=2, prompt_logprobs=0))
    world.run()
    assert world.core.scheduler.preemptions > 0
    assert asks.outputs[0].prompt_logprobs is not None  # their values are checked by the world


def test_resetting_the_prefix_cache_forgets_and_publishes_nothing_of_older_runs() -> None:
    world = World(block_size=4, max_step_tokens=8)
    world.submit(make_request("old", prompt=range(1, 21), max_tokens=2, ignore_eos=True))
    world.step()
    world.core.reset_prefix_cache()
    world.run()
    pool = world.core.kv.pools[0]
    assert all(pool.key_of(block) is None for block in range(pool.num_blocks))
    again = world.submit(make_request("again", prompt=range(1, 21), max_tokens=2, ignore_eos=True))
    world.run()
    assert again.outputs[0].cached == CachedTokens()
    assert sum(pool.key_of(block) is not None for block in range(pool.num_blocks)) == 5


def test_timings_divide_a_requests_life() -> None:
    world = World(max_running=1)
    world.submit(make_request("a", max_tokens=10, ignore_eos=True))
    waits = world.submit(make_request("b", max_tokens=10, ignore_eos=True))
    begin_s = world.now_s
    world.run()
    timings = waits.outputs[-1].timings
    assert timings is not None
    assert timings.queued_s >= 0.1 - 1e-9
    assert timings.decode_s == pytest.approx(0.09)
    assert timings.queued_s + timings.prefill_s + timings.decode_s <= world.now_s - begin_s


def test_load_counts_what_happens() -> None:
    world = World(max_running=2, max_step_tokens=8)
    for name in "abc":
        world.submit(make_request(name, prompt=range(1, 13), max_tokens=3, ignore_eos=True))
    world.step()
    load = world.core.load()
    assert (load.running, load.waiting, load.waiting_kv) == (1, 2, 0)
    assert load.queued_uncached_tokens == 4 + 12 + 12
    assert load.kv_blocks_used == 2
    assert load.kv_blocks_total == 64
    world.run()
    load = world.core.load()
    assert load.requests_total == {"length": 3}
    assert load.prompt_tokens_total == 36
    assert load.output_tokens_total == 9
    assert load.cached_tokens_total > 0
    assert load.prefill_tokens_total == 36 - load.cached_tokens_total
    assert load.prefill_busy_s_total > 0
    assert 0 < load.decode_tokens_total < load.output_tokens_total
    assert load.decode_context_tokens_total >= 13 * load.decode_tokens_total
    assert load.decode_busy_s_total > 0
    assert load.running_context_tokens == 0
    assert load.steps_total == world.core.scheduler.next_step


def test_load_tells_what_decodes_and_does_not_count_queued_tokens_that_are_cached() -> None:
    world = World(max_running=1, max_step_tokens=64)
    world.submit(make_request("first", prompt=range(1, 13), max_tokens=40, ignore_eos=True))
    world.step()
    world.step()
    load = world.core.load()
    assert (load.queued_uncached_tokens, load.running_context_tokens) == (0, 13)
    world.submit(make_request("like it", prompt=[*range(1, 13), 1, 2, 3], max_tokens=1))
    world.submit(make_request("fresh", prompt=range(20, 30), max_tokens=1))
    assert world.core.load().queued_uncached_tokens == 3 + 10
    world.run()
    assert world.core.load().queued_uncached_tokens == 0


@pytest.mark.parametrize(("configured", "runners", "expected"), [(None, 2, 2), (None, 1, 1), (1, 2, 1), (4, 2, 2)])
def test_steps_in_flight_are_the_runners_unless_the_configuration_says_less(
    configured: int | None, runners: int, expected: int
) -> None:
    world = World(in_flight=runners, max_late=50)
    core = EngineCore(world.info, EngineConfig(in_flight_steps=configured), world.runner, (65,))
    core.submit(make_request(seed=1, max_tokens=30))
    most = 0
    for _ in range(12):
        core.step()  # waits for a result once as many are in flight as may be
        most = max(most, len(core.scheduler.ledger) + 1)
    assert most == expected


# ---- the KV port
