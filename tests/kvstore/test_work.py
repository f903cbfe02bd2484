"""The order of a tier's work, without threads and without a place."""

from __future__ import annotations

import pytest

from kvstore.tier import Deadline
from kvstore.work import Job, Kind, WorkQueue


def job(kind: Kind, seconds: float = 1000.0) -> Job[str]:
    return Job(kind, "work", lambda outcome, busy_s: None, Deadline.after(seconds), size_bytes=10)


def test_saves_wait_for_the_loads_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.work.MAX_YIELD_S", 1000.0)
    queue = WorkQueue[str]()
    save, load = job("save"), job("load")
    assert queue.put("save", [save])
    assert not queue._yields(save)
    assert queue.put("load", [load])
    assert queue._yields(save)
    assert queue.take("load") is load
    assert queue.take("save") is save


def test_saves_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.work.MAX_YIELD_S", 0.0)
    queue = WorkQueue[str]()
    save = job("save")
    queue.put("load", [job("load")])
    queue.put("save", [save])
    assert queue.take("save") is save


def test_what_is_past_its_deadline_is_told_once() -> None:
    queue = WorkQueue[str]()
    running, waiting, fine = job("load", -1), job("load", -1), job("save")
    queue.put("load", [running, waiting])
    queue.put("save", [fine])
    assert queue.take("load") is running
    assert queue.expire() == ([waiting], [running])
    assert queue.expire() == ([], [])
    assert running.hanging
    assert queue.waiting("load") == (0, 0)
    assert queue.waiting("save") == (1, 10)
    queue.done(running)


def test_a_closed_queue_gives_out_what_waits_and_takes_no_more() -> None:
    queue = WorkQueue[str]()
    first = job("save")
    queue.put("save", [first])
    queue.close()
    assert not queue.put("save", [job("save")])
    assert queue.take("load") is None
    assert queue.take("save") is first
    assert queue.take("save") is None
    queue.done(first)
    assert not queue.wait_busy()


def test_cancelled_jobs_are_nobody_elses() -> None:
    queue = WorkQueue[str]()
    jobs = [job("load"), job("load")]
    queue.put("load", jobs)
    queue.close()
    assert queue.cancel() == jobs
    assert queue.take("load") is None
    queue.wait_idle(Deadline.after(1000.0))


def test_more_work_is_taken_up_to_a_size_and_a_number() -> None:
    queue = WorkQueue[str]()
    jobs = [job("load") for _ in range(6)]
    queue.put("load", jobs)
    first = queue.take("load")
    assert first is jobs[0]
    assert queue.take_more("load", size_bytes=25, count=10) == jobs[1:3]
    assert queue.take_more("load", size_bytes=100, count=1) == jobs[3:4]
    assert queue.take_more("load", size_bytes=9, count=10) == queue.take_more("save", size_bytes=9, count=10) == []
    assert queue.waiting("load") == (2, 20)
    for one in jobs[:4]:
        queue.done(one)
    assert queue.cancel() == jobs[4:]
    queue.wait_idle(Deadline.after(1000.0))
