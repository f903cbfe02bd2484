"""Which silent engine is stuck, and which only computes; what the system tells of a real process."""

from __future__ import annotations

import signal
import subprocess
import sys

import msgspec
import pytest

from engine.wire.remote_state import RemoteState
from server.loop_watch import COMPUTING_PATIENCE, LOOKS, LoopWatch, main_thread_marks
from tests.support.infos import engine_info
from tests.support.until import until

PID = 7


class Heard:
    """An engine and its process, as the watch sees them."""

    def __init__(self) -> None:
        self.frames_received = 0
        self.marks: str | None = "0"
        self.remote = RemoteState(state="ready", info=msgspec.structs.replace(engine_info(), pid=PID))
        self.watch = LoopWatch(self, 1.0, lambda _pid: self.marks)
        self.watch.look(PID)

    def state(self) -> RemoteState:
        return self.remote

    def looks_until_stuck(self, *, runs: bool = False, pid: int | None = PID, limit: int = 1000) -> int:
        """Count while it says nothing, and its main thread runs or not."""
        for look in range(1, limit):
            if runs:
                self.marks = str(look)
            self.watch.look(pid)
            if self.watch.is_stuck_for(LOOKS):
                return look
        return limit


def test_one_that_says_nothing_is_stuck_when_its_thread_does_not_run_either() -> None:
    assert Heard().looks_until_stuck() == LOOKS
    assert Heard().looks_until_stuck(runs=True) == LOOKS * COMPUTING_PATIENCE
    unknown = Heard()
    unknown.marks = None
    assert unknown.looks_until_stuck() == LOOKS * COMPUTING_PATIENCE


def test_a_word_of_it_or_a_turn_of_its_thread_is_enough() -> None:
    engine = Heard()
    for _ in range(10):
        assert engine.looks_until_stuck(limit=LOOKS) == LOOKS
        engine.frames_received += 1
        engine.watch.look(PID)
    assert engine.looks_until_stuck() == LOOKS
    engine.marks = "more"
    engine.watch.look(PID)
    assert not engine.watch.is_stuck_for(LOOKS)


def test_one_that_loads_or_that_is_gone_is_never_stuck() -> None:
    engine = Heard()
    assert engine.looks_until_stuck(pid=None) == 1000
    assert engine.looks_until_stuck(pid=PID + 1) == 1000, "another process has not served yet"
    engine.remote = RemoteState(state="dead")
    assert engine.looks_until_stuck() == LOOKS, "the connection is lost, the process is there"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
async def test_the_marks_of_a_process_stand_still_while_it_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:  # noqa: ASYNC220 - it starts at once
        try:
            before = main_thread_marks(process.pid)
            assert before is not None
            await until(lambda: main_thread_marks(process.pid) != before, "it runs")
            process.send_signal(signal.SIGSTOP)
            seen: list[str | None] = []

            def stands_still() -> bool:
                seen.append(main_thread_marks(process.pid))
                return len(seen) > 20 and len(set(seen[-20:])) == 1

            await until(stands_still, "it has stopped")
            process.send_signal(signal.SIGCONT)
            await until(lambda: main_thread_marks(process.pid) != seen[-1], "it runs again")
        finally:
            process.kill()
    assert main_thread_marks(process.pid) is None
