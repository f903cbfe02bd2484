"""Buckets of API keys: never more than the limit and what has drained, whatever the order; shared by processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from server.access import usage_table
from server.access.usage_table import KEY_BYTES, Limits, UsageTable, table_bytes

KEY = b"k" * KEY_BYTES
OTHER = b"o" * KEY_BYTES


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def shared(path: Path, processes: int) -> Path:
    path.write_bytes(b"")
    with path.open("r+b") as file:
        file.truncate(table_bytes(processes))
    return path


def test_a_key_may_use_one_limit_at_once_and_then_what_drains() -> None:
    clock = Clock()
    table, limits = UsageTable(clock=clock), Limits(requests=4)
    assert [table.take_request(KEY, limits) for _ in range(5)] == [0, 0, 0, 0, pytest.approx(15.0)]
    assert table.take_request(OTHER, limits) == 0, "another key has its own"
    clock.now_s += 15.0
    assert [table.take_request(KEY, limits) for _ in range(2)] == [0, pytest.approx(15.0)]
    clock.now_s += 3600.0
    assert [table.take_request(KEY, limits) for _ in range(5)].count(0) == 4, "no more is saved up than one limit"


def test_held_tokens_do_not_drain_and_what_was_not_used_comes_back_at_once() -> None:
    clock = Clock()
    table, limits = UsageTable(clock=clock), Limits(tokens=1000)
    assert table.hold_tokens(KEY, limits, 900) == 0
    clock.now_s += 600.0
    assert table.hold_tokens(KEY, limits, 200) == pytest.approx(6.0), "the request still runs"
    table.spend_tokens(KEY, limits, held=900, spent=100)
    assert table.used(KEY, limits).tokens == 100
    assert table.hold_tokens(KEY, limits, 900) == 0
    table.spend_tokens(KEY, limits, held=900, spent=1300)
    assert table.used(KEY, limits).tokens == 1400
    assert table.hold_tokens(KEY, limits, 600) == pytest.approx(60.0), "what was overdrawn is paid back first"
    clock.now_s += 60.0
    assert table.hold_tokens(KEY, limits, 600) == 0


def test_a_limit_that_changes_keeps_what_was_used_and_one_that_goes_forgets_it() -> None:
    clock = Clock()
    table = UsageTable(clock=clock)
    for _ in range(10):
        assert table.take_request(KEY, Limits(requests=10)) == 0
    assert table.take_request(KEY, Limits(requests=5)) == pytest.approx(72.0)
    assert table.take_request(KEY, Limits(requests=11)) == 0
    assert table.take_request(KEY, Limits()) == 0
    assert table.used(KEY, Limits()).requests == 0


def test_more_keys_than_rows_take_the_place_of_those_that_were_used_longest_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usage_table, "ROWS", 8)
    monkeypatch.setattr(usage_table, "NEIGHBOURS", 4)
    clock = Clock()
    table, limits = UsageTable(clock=clock), Limits(requests=1, tokens=100)
    keys = [bytes([1 + number]) + bytes(7) + b"12345678" for number in range(200)]
    table.hold_tokens(keys[0], limits, 50)
    for key in keys[1:]:
        clock.now_s += 0.001
        assert table.take_request(key, limits) == 0, "a new key has used nothing"
    assert table.used(keys[-1], limits).requests == pytest.approx(1.0)
    assert table.used(keys[0], limits).tokens == 50, "who still runs stays"
    assert len(table._rows) == table_bytes(1)


def test_processes_share_one_limit_and_a_new_one_gives_back_what_its_forerunner_held(tmp_path: Path) -> None:
    clock, limits = Clock(), Limits(requests=5, tokens=1000)
    path = shared(tmp_path / "usage", 3)
    tables = [UsageTable(path=path, processes=3, index=index, clock=clock) for index in range(3)]
    waits = [tables[number % 3].take_request(KEY, limits) for number in range(9)]
    assert waits.count(0.0) == 5
    assert tables[0].hold_tokens(KEY, limits, 400) == tables[1].hold_tokens(KEY, limits, 400) == 0
    assert tables[2].hold_tokens(KEY, limits, 400) > 0
    tables[0].close()
    again = UsageTable(path=path, processes=3, index=0, clock=clock)
    assert tables[2].used(KEY, limits).tokens == 400
    assert again.hold_tokens(KEY, limits, 400) == 0
    for table in (again, *tables[1:]):
        table.close()


HAMMER = """
import sys
from pathlib import Path
from server.access.usage_table import Limits, UsageTable
table = UsageTable(path=Path(sys.argv[1]), processes=3, index=int(sys.argv[2]), clock=lambda: 7.0)
key, limits = b"k" * 16, Limits(requests=1000, tokens=10**6)
sys.stdin.readline()
taken = 0
for _ in range(600):
    taken += table.take_request(key, limits) == 0
    if table.hold_tokens(key, limits, 10) == 0:
        table.spend_tokens(key, limits, 10, 7)
print(taken)
"""


def test_processes_that_count_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path = shared(tmp_path / "usage", 3)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HAMMER, str(path), str(index)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    taken = [int(process.communicate()[0]) for process in processes]
    assert sum(taken) == 1000
    table = UsageTable(path=path, processes=3, index=0, clock=lambda: 7.0)
    assert table.used(KEY, Limits(requests=1000, tokens=10**6)) == (1000.0, 3 * 600 * 7.0)
    table.close()


HOLD_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.readline()
"""


def test_a_process_that_stops_inside_the_lock_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_table, "LOCK_TRIES", 3)
    path = shared(tmp_path / "usage", 1)
    table, limits = UsageTable(path=path, clock=Clock()), Limits(requests=2)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        assert [table.take_request(KEY, limits) for _ in range(3)].count(0.0) == 2
        holder.kill()
    table.close()


Step = tuple[float, int, int, int]


@settings(deadline=None, max_examples=80)
@given(
    limit=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.floats(0, 200), st.integers(1, 1500)), max_size=60),
)
def test_in_any_span_no_more_than_one_limit_and_what_drains_is_taken(
    limit: int, steps: list[tuple[float, int]]
) -> None:
    """The twin is the definition: it looks at every span between two requests."""
    clock = Clock()
    table, limits = UsageTable(clock=clock), Limits(tokens=limit)
    taken: list[tuple[float, int]] = []
    for pause_s, tokens in steps:
        clock.now_s += pause_s
        wait_s = table.hold_tokens(KEY, limits, tokens)
        if wait_s == 0:
            table.spend_tokens(KEY, limits, held=tokens, spent=tokens)
            taken.append((clock.now_s, tokens))
        elif tokens <= limit:
            clock.now_s += wait_s + 1e-6
            assert table.hold_tokens(KEY, limits, tokens) == 0, "it was told how long to wait"
            table.spend_tokens(KEY, limits, held=tokens, spent=0)
    for first in range(len(taken)):
        total = 0
        for at_s, tokens in taken[first:]:
            total += tokens
            assert total <= limit * (1 + (at_s - taken[first][0]) / 60) + 1e-6


class AnyOrder(RuleBasedStateMachine):
    """Two processes' requests of one key that take, hold and spend in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.limits = Limits(requests=7, tokens=500)
        self.table = UsageTable(clock=self.clock)
        self.held: list[int] = []
        self.spent: list[tuple[float, int]] = []

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def take(self) -> None:
        before = self.table.used(KEY, self.limits)
        is_taken = self.table.take_request(KEY, self.limits) == 0
        assert is_taken == (before.requests + 1 <= 7)
        assert self.table.used(KEY, self.limits).requests == before.requests + is_taken

    @rule(tokens=st.integers(1, 500))
    def hold(self, tokens: int) -> None:
        before = self.table.used(KEY, self.limits).tokens
        if self.table.hold_tokens(KEY, self.limits, tokens) == 0:
            assert before + tokens <= 500
            self.held.append(tokens)
        else:
            assert before + tokens > 500

    @rule(share=st.floats(0, 1.5), which=st.integers(0, 100))
    def spend(self, share: float, which: int) -> None:
        if self.held:
            held = self.held.pop(which % len(self.held))
            self.table.spend_tokens(KEY, self.limits, held, int(held * share))

    @invariant()
    def what_is_held_is_what_runs(self) -> None:
        assert self.table._held_in_all(self.table._find(KEY)) == sum(self.held)
        assert self.table.used(KEY, self.limits).tokens >= sum(self.held)

    def teardown(self) -> None:
        for held in self.held:
            self.table.spend_tokens(KEY, self.limits, held, 0)
        self.clock.now_s += 1e6
        assert self.table.used(KEY, self.limits) == (0.0, 0.0)
        self.table.close()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
