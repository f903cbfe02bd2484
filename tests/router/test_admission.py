"""Who is admitted, who waits, who is refused; under any order of events the sums return to zero."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.errors import PressureError
from router.admission import Admission, AdmissionLimits, ShedReason, Ticket


class Door:
    """An admission queue in front of a pool of 100 tokens/s with a budget of 1,000 tokens."""

    def __init__(self, **limits: Any) -> None:  # noqa: ANN401
        self.now_s = 0.0
        self.backlog = 0.0
        self.rate: float | None = 100.0
        self.ended: list[Ticket] = []
        self.admission = Admission(
            lambda: (self.backlog, self.rate), lambda: self.now_s, AdmissionLimits(budget_s=10.0, **limits)
        )

    def offer(self, tokens: int = 100, priority: int = 0) -> Ticket:
        return self.admission.offer(tokens, priority, self.ended.append)

    def admit_all(self) -> list[Ticket]:
        """Let the pool be idle until nobody waits; return the tickets in the order of their turns."""
        self.ended.clear()
        self.backlog = 0
        while self.admission.queued:
            self.admission.pump()
            for ticket in self.ended:
                self.admission.settle(ticket)
        return self.ended


def test_a_budget_of_seconds_may_be_under_way_and_what_comes_beyond_waits() -> None:
    door = Door()
    first = door.offer(600)
    assert first.state == "admitted"
    second = door.offer(600)
    assert second.state == "waiting", "the first is not in the backlog yet and counts all the same"
    door.backlog = 600
    door.admission.settle(first)
    door.admission.pump()
    assert second.state == "waiting"
    door.backlog = 400
    door.admission.pump()
    assert door.ended == [second]
    assert second.state == "admitted"


def test_what_has_to_be_computed_is_asked_only_where_a_prompt_does_not_fit_whole() -> None:
    door = Door()
    asked: list[int] = []

    def offer(tokens: int, uncached: int) -> Ticket:
        def tell() -> int:
            asked.append(uncached)
            return uncached

        return door.admission.offer(tokens, 0, door.ended.append, tell)

    first = offer(900, 10)
    assert (first.state, first.tokens, asked) == ("admitted", 900, [])
    cached = offer(900, 50)
    assert (cached.state, cached.tokens, asked) == ("admitted", 50, [50])
    fresh = offer(900, 900)
    assert (fresh.state, fresh.tokens) == ("waiting", 900)
    behind = offer(10, 5)
    assert (behind.state, behind.tokens) == ("waiting", 5), "it comes behind one that waits"
    assert door.admission.queued_tokens == 905


def test_an_idle_pool_takes_any_prompt_and_an_unmeasured_one_takes_all() -> None:
    door = Door()
    assert door.offer(10**6).state == "admitted"
    assert door.offer(1).state == "waiting"
    door = Door()
    door.rate = None
    assert {door.offer(10**6).state for _ in range(3)} == {"admitted"}


def test_who_came_first_goes_first_also_if_one_behind_would_fit() -> None:
    door = Door()
    door.backlog = 900
    big, small = door.offer(200), door.offer(50)
    door.admission.pump()
    assert (big.state, small.state) == ("waiting", "waiting")
    assert door.admit_all() == [big, small]


def test_a_smaller_priority_goes_first_and_waiting_makes_up_for_a_larger_one() -> None:
    door = Door(aging_s=10.0)
    door.backlog = 1000
    late_batch = door.offer(priority=1)
    door.now_s = 9.0
    default, interactive = door.offer(), door.offer(priority=-1)
    assert door.admit_all() == [interactive, default, late_batch]
    door.backlog, door.now_s = 1000, 20.0
    old_batch = door.offer(priority=1)
    door.now_s = 31.0
    newcomer = door.offer()
    assert door.admit_all() == [old_batch, newcomer]


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    door = Door(max_queued=2)
    door.backlog = 1000
    door.offer(300), door.offer(300)
    with pytest.raises(PressureError) as refused:
        door.offer(300)
    assert refused.value.retry_after_s == pytest.approx(6.0)
    assert str(refused.value) == "The queue is full."
    assert door.admission.shed == {"queue_full": 1}


def test_a_full_queue_sheds_its_last_of_a_lower_class_for_a_higher_one() -> None:
    door = Door(max_queued=2)
    door.backlog = 1000
    first, last = door.offer(priority=2), door.offer(priority=2)
    better = door.offer(priority=0)
    assert (first.state, last.state, better.state) == ("waiting", "shed", "waiting")
    assert door.ended == [last]
    with pytest.raises(PressureError):
        door.offer(priority=2)
    assert door.admission.shed == {"displaced": 1, "queue_full": 1}


def test_one_that_has_aged_keeps_its_place_against_a_higher_class() -> None:
    door = Door(max_queued=1, aging_s=10.0)
    door.backlog = 1000
    old_batch = door.offer(priority=2)
    door.now_s = 19.0
    better = door.offer(priority=0)
    assert (old_batch.state, better.state) == ("shed", "waiting")
    door.admission.leave(better)
    old_batch = door.offer(priority=2)
    door.now_s += 21.0
    with pytest.raises(PressureError):
        door.offer(priority=0)
    assert old_batch.state == "waiting"


def test_the_last_of_all_yields_and_not_one_of_a_lower_class_that_goes_before_it() -> None:
    door = Door(max_queued=2, aging_s=10.0)
    door.backlog = 1000
    old_batch = door.offer(priority=1)
    door.now_s = 30.0
    default = door.offer(priority=0)
    interactive = door.offer(priority=-1)
    assert (old_batch.state, default.state, interactive.state) == ("waiting", "shed", "waiting")


def test_waits_are_told_once_and_by_class() -> None:
    door = Door()
    door.admission.settle(door.offer(1))
    door.backlog = 1000
    for priority in (0, -3, 2, 2):
        door.offer(priority=priority)
    assert door.admission.queued_by_class == {"interactive": 1, "default": 1, "batch": 2}
    door.now_s = 4.0
    left = door.offer(priority=5)
    door.admission.leave(left, "queue_timeout")
    door.admission.leave(left, "queue_timeout")
    assert len(door.admit_all()) == 4
    assert door.admission.take_waits() == [0.0, 4.0, 4.0, 4.0, 4.0]
    assert door.admission.take_waits() == []
    assert door.admission.queued_by_class == {"interactive": 0, "default": 0, "batch": 0}
    assert door.admission.shed == {"queue_timeout": 1}


def test_every_reason_has_a_message_of_its_own() -> None:
    door = Door()
    messages = {str(door.admission.refusal(reason)) for reason in get_args(ShedReason)}
    assert len(messages) == len(get_args(ShedReason))


def test_a_queue_of_no_places_refuses_all_that_does_not_fit() -> None:
    door = Door(max_queued=0)
    door.backlog = 1000
    with pytest.raises(PressureError):
        door.offer(priority=-5)


def test_one_that_left_is_passed_over() -> None:
    door = Door()
    door.backlog = 1000
    first, second = door.offer(), door.offer()
    door.admission.leave(first)
    door.admission.leave(first)
    assert door.admission.queued == 1
    assert door.admit_all() == [second]


class AnyOrder(RuleBasedStateMachine):
    """Tickets that wait, leave, are shed, are settled."""

    tickets: Bundle[Ticket] = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.door = Door(max_queued=4)
        self.mine: list[Ticket] = []

    @rule(target=tickets, tokens=st.integers(1, 2000), priority=st.integers(-20, 20))
    def offer(self, tokens: int, priority: int) -> Ticket:
        try:
            ticket = self.door.offer(tokens, priority)
        except PressureError:
            ticket = Ticket(tokens, priority, 0.0, lambda ticket: None)
            ticket.state = "shed"
            return ticket
        self.mine.append(ticket)
        return ticket

    @rule(tokens=st.integers(0, 3000), seconds=st.floats(0, 100))
    def pool_moves(self, tokens: int, seconds: float) -> None:
        self.door.backlog = tokens
        self.door.now_s += seconds
        self.door.admission.pump()

    @rule(ticket=tickets)
    def leave(self, ticket: Ticket) -> None:
        self.door.admission.leave(ticket)

    @rule(ticket=consumes(tickets), times=st.integers(1, 2))
    def settle(self, ticket: Ticket, times: int) -> None:
        for _ in range(times):
            self.door.admission.settle(ticket)

    @invariant()
    def sums_are_those_of_the_tickets(self) -> None:
        admission = self.door.admission
        waiting = [one for one in self.mine if one.state == "waiting"]
        assert admission.queued == len(waiting) <= 4
        assert admission.queued_tokens == sum(one.tokens for one in waiting)
        assert sum(admission.queued_by_class.values()) == len(waiting)
        assert admission.unsettled_tokens == sum(one.tokens for one in self.mine if one.state == "admitted")
        told = self.door.ended
        assert len(told) == len({id(one) for one in told}), "told once"

    def teardown(self) -> None:
        for ticket in self.mine:
            self.door.admission.leave(ticket)
            self.door.admission.settle(ticket)
        assert (self.door.admission.queued, self.door.admission.unsettled_tokens) == (0, 0)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
