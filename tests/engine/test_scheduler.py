"""Budget, order, admission, preemption and the plans that come out, seen through the core over a fake runner."""

from __future__ import annotations

from engine.plan import StepPlan
from engine.protocol import KVGroupSpec
from engine.request import RequestState
from tests.support.core_world import FULL, World, make_request, sliding


def recorded(world: World) -> list[StepPlan]:
    world.runner.plans = []
    return world.runner.plans


def test_a_prompt_larger_than_the_budget_is_computed_in_chunks() -> None:
    world = World(max_step_tokens=8)
    plans = recorded(world)
    world.submit(make_request(prompt=range(1, 21), max_tokens=1))
    world.run()
    rows = [plan.rows[0] for plan in plans]
    assert [(row.start, row.count, row.sample) for row in rows] == [(0, 8, False), (8, 8, False), (16, 4, True)]
    assert rows[1].token_ids == tuple(range(9, 17))


def test_decode_rows_leave_the_token_on_the_device() -> None:
    for in_flight in (1, 3):
        world = World(in_flight=in_flight)
        plans = recorded(world)
        world.submit(make_request(max_tokens=4, ignore_eos=True))
        world.run()
        rows = [row for plan in plans for row in plan.rows]
        assert [(row.start, row.count, row.token_ids) for row in rows] == [
            (0, 3, (1, 2, 3)),
            (3, 1, None),
            (4, 1, None),
            (5, 1, None),
        ]


def test_new_blocks_are_sent_once_and_cover_the_row() -> None:
    world = World(block_size=4, specs=[FULL, FULL], num_blocks=[30, 30])
    plans = recorded(world)
    world.submit(make_request(prompt=range(1, 7), max_tokens=8, ignore_eos=True))
    world.run()
    sent = [tuple(len(blocks) for blocks in row.new_blocks) for plan in plans for row in plan.rows]
    assert sent == [(2, 2), (0, 0), (0, 0), (1, 1), (0, 0), (0, 0), (0, 0), (1, 1)]


def test_prefill_leaves_a_token_of_budget_for_everyone_behind() -> None:
    world = World(max_step_tokens=8)
    world.submit(make_request("a", prompt=range(1, 4), max_tokens=20, ignore_eos=True))
    world.submit(make_request("b", prompt=range(2, 5), max_tokens=20, ignore_eos=True))
    world.step()
    plans = recorded(world)
    world.submit(make_request("long", prompt=range(1, 30), max_tokens=2, priority=-1))
    world.step()
    world.step()
    counts = [row.count for row in plans[1].rows]
    assert counts == [6, 1, 1]  # the urgent prefill first, but both streams go on
    world.run()


def test_smaller_priority_is_admitted_first_and_then_arrival() -> None:
    world = World(max_running=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", -1)):
        world.submit(make_request(name, max_tokens=1, priority=priority))
    order = []
    while world.core.has_work:
        order += [output.request_id for output in world.step()]
    assert order == ["d", "b", "c", "a"]


def test_nobody_overtakes_a_request_that_waits_for_room() -> None:
    world = World(num_blocks=[11], max_step_tokens=64)
    world.submit(make_request("runs", prompt=range(1, 21), max_tokens=10, ignore_eos=True))
    world.step()
    world.submit(make_request("large", prompt=range(11, 39), max_tokens=1))
    world.submit(make_request("small", prompt=[5], max_tokens=1))
    for _ in range(5):
        assert {output.request_id for output in world.step()} <= {"runs"}
    world.run()


def test_admission_keeps_the_watermark_while_others_run() -> None:
    world = World(num_blocks=[201], max_model_len=1000, max_step_tokens=1000)
    world.submit(make_request("runs", prompt=[1] * 4, max_tokens=30, ignore_eos=True))
    world.step()
    world.submit(make_request("large", prompt=[2] * 4 * 197, max_tokens=1))
    world.step()
    assert len(world.core.scheduler.running) == 1  # 198 blocks are free, 2 of them are the watermark
    world.run()


def test_a_request_that_needs_every_block_runs_alone() -> None:
    world = World(num_blocks=[11], max_step_tokens=64)
    attempt = world.submit(make_request(prompt=[1] * 30, max_tokens=10, ignore_eos=True))
    world.run()
    assert attempt.finish_reason == "length"


def test_the_newest_of_the_lowest_priority_is_preempted_and_resumes() -> None:
    world = World(num_blocks=[9], block_size=4)
    old = world.submit(make_request("old", prompt=range(1, 13), max_tokens=16, ignore_eos=True))
    new = world.submit(make_request("new", prompt=range(21, 33), max_tokens=16, ignore_eos=True))
    while world.core.scheduler.preemptions == 0:
        world.step()
    assert [request.request_id for request in world.core.scheduler.running] == ["old"]
    assert [request.request_id for request in world.core.scheduler.waiting] == ["new"]
    world.run()
    assert len(old.emitted) == len(new.emitted) == 16


def test_a_request_alone_may_use_the_watermark() -> None:
    world = World(num_blocks=[101], block_size=4, max_model_len=1000, max_step_tokens=1000)
    for name in ("first", "again"):  # the second hits 99 of the 100 blocks
        attempt = world.submit(make_request(name, prompt=[1] * 399, max_tokens=1))
        world.run()
        assert attempt.finish_reason is not None


def test_nobody_else_is_preempted_while_blocks_are_coming_back() -> None:
    world = World(num_blocks=[13], block_size=4, in_flight=4, max_late=3)
    for index, name in enumerate("abc"):
        prompt = range(index * 15 + 1, index * 15 + 14)
        world.submit(make_request(name, prompt=prompt, max_tokens=20, ignore_eos=True))
    scheduler, waited = world.core.scheduler, 0
    while world.core.has_work:
        coming, before = scheduler.ledger.awaits_release, scheduler.preemptions
        world.step()
        waited += coming
        assert scheduler.preemptions - before <= (0 if coming else 1)
    assert waited > 0


def test_a_resumed_request_names_its_tokens_and_takes_its_cached_blocks() -> None:
    world = World(num_blocks=[9], block_size=4)
    world.submit(make_request("old", prompt=range(1, 13), max_tokens=7, ignore_eos=True))
    new = world.submit(make_request("new", prompt=range(21, 33), max_tokens=16, ignore_eos=True))
    while world.core.scheduler.preemptions == 0:
        world.step()
    plans = recorded(world)
    world.run()
    row = next(row for plan in plans if plan.new_slots for row in plan.rows if row.slot == plan.new_slots[0].slot)
    assert row.start > 0
    assert row.token_ids is not None
    everything = new.request.prompt_ids + new.tokens
    assert list(row.token_ids) == everything[row.start : row.start + row.count]
    assert row.count > 1  # output tokens are computed again as one chunk


def test_a_request_preempted_in_flight_waits_for_its_tokens() -> None:
    world = World(num_blocks=[9], block_size=4, in_flight=4, max_late=3)
    world.submit(make_request("old", prompt=range(1, 13), max_tokens=16, ignore_eos=True))
    new = world.submit(make_request("new", prompt=range(21, 33), max_tokens=16, ignore_eos=True))
    scheduler = world.core.scheduler
    while scheduler.preemptions == 0:
        world.step()
    request = world.core._requests["new"]
    while request.preempted_in_flight:
        assert len(scheduler.waiting) == 0
        world.step()
    assert request.pending == 0
    assert request.state is RequestState.WAITING
    world.run()
    assert new.finish_reason == "length"


def test_a_whole_prompt_hit_computes_the_last_token_into_no_block() -> None:
    world = World(block_size=4)
    world.submit(make_request("first", prompt=range(1, 9), max_tokens=1))
    world.run()
    plans = recorded(world)
    again = world.submit(make_request("again", prompt=range(1, 9), max_tokens=3, ignore_eos=True))
    world.run()
    row = plans[0].rows[0]
    assert (row.start, row.count, row.write_start, row.token_ids) == (7, 1, 8, (8,))
    assert [row.write_start for plan in plans[1:] for row in plan.rows] == [0, 0]
    assert again.outputs[0].cached is not None
    assert again.outputs[0].cached.device == 7


def test_freed_slots_are_announced_once_before_they_are_taken_again() -> None:
    world = World(max_running=1)
    plans = recorded(world)
    for name in "abc":
        world.submit(make_request(name, max_tokens=2, ignore_eos=True))
    world.run()
    events = [(plan.freed_slots, tuple(new.slot for new in plan.new_slots)) for plan in plans]
    assert events == [((), (0,)), ((), ()), ((0,), (0,)), ((), ()), ((0,), (0,)), ((), ())]


def test_choices_of_one_request_share_one_prefill() -> None:
    world = World(block_size=4, max_step_tokens=8)
    attempts = [
        world.submit(make_request(f"c{j}", prompt=range(1, 21), seed=5 + j, group_id="c", max_tokens=4))
        for j in range(4)
    ]
    plans = recorded(world)
    world.run()
    prefill = sum(row.count for plan in plans for row in plan.rows if row.token_ids is not None)
    assert prefill == 20 + 3  # the others compute the last token alone
    assert len({tuple(attempt.emitted) for attempt in attempts}) > 1


def test_only_the_same_prompt_in_the_same_scope_waits_for_a_leader() -> None:
    world = World(block_size=4, max_step_tokens=64)
    world.submit(make_request("leader", prompt=range(1, 21), group_id="g", max_tokens=4))
    world.submit(make_request("same", prompt=range(1, 21), group_id="g", max_tokens=4))
    world.submit(make_request("prompt", prompt=[9, *range(2, 21)], group_id="g", max_tokens=4))
    world.submit(make_request("scope", prompt=range(1, 21), group_id="g", max_tokens=4, cache_scope=b"b" * 32))
    world.step()
    assert [request.request_id for request in world.core.scheduler.waiting] == ["same"]
    world.run()


def test_a_leader_that_is_aborted_leaves_nobody_waiting() -> None:
    world = World(block_size=4, max_step_tokens=4)
    for j in range(3):
        world.submit(make_request(f"c{j}", prompt=range(1, 21), group_id="c", max_tokens=4))
    world.step()
    world.core.abort("c0")
    world.run()


def test_sliding_windows_let_a_sequence_grow_past_its_pool() -> None:
    world = World(specs=[sliding(8)], num_blocks=[5], block_size=4)
    attempt = world.submit(make_request(prompt=[1] * 50, max_tokens=60, ignore_eos=True))
    world.run()
    assert len(attempt.emitted) == 60


def test_a_prefix_hit_spans_full_and_sliding_groups() -> None:
    specs: list[KVGroupSpec] = [FULL, sliding(6)]
    world = World(specs=specs, num_blocks=[65, 65], block_size=4)
    world.submit(make_request("first", prompt=range(1, 23), max_tokens=1))
    world.run()
    again = world.submit(make_request("again", prompt=[*range(1, 23), 40, 41], max_tokens=1))
    world.run()
    assert again.outputs[0].cached is not None
    assert again.outputs[0].cached.device == 20


def test_scopes_share_no_blocks() -> None:
    world = World()
    world.submit(make_request("mine", prompt=range(1, 21), max_tokens=1, cache_scope=b"a" * 32))
    world.run()
    other = world.submit(make_request("yours", prompt=range(1, 21), max_tokens=1, cache_scope=b"b" * 32))
    world.run()
    assert other.outputs[0].cached is not None
    assert other.outputs[0].cached.total == 0


def test_without_the_prefix_cache_nothing_is_published() -> None:
    world = World(prefix_cache=False)
    for name in "ab":
        attempt = world.submit(make_request(name, prompt=range(1, 21), max_tokens=1))
        world.run()
        assert attempt.outputs[0].cached is not None
        assert attempt.outputs[0].cached.total == 0
