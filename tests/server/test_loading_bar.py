"""What is shown while the model loads."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence

import pytest

from engine.wire.remote_state import RemoteState
from server.loading_bar import show_loading


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class States:
    """An engine that goes through these states, one at every change."""

    def __init__(self, states: Sequence[RemoteState]) -> None:
        self._states = list(states)

    def state(self) -> RemoteState:
        return self._states[0]

    async def wait_changed(self) -> RemoteState:
        self._states.pop(0)
        return self._states[0]


STATES = [
    RemoteState(),
    RemoteState(progress=0.25, message="fetching tiny"),
    RemoteState(progress=0.5, message="fetching tiny"),
    RemoteState(progress=1.0, message="reading weights"),
]


@pytest.mark.parametrize("end", ["ready", "failed", "dead"])
async def test_bar_is_drawn_in_place_and_gone_in_the_end(end: str) -> None:
    out = Terminal()
    await show_loading(States([*STATES, RemoteState(state=end)]), out)  # type: ignore[arg-type]
    drawn = out.getvalue().split("\r\x1b[2K")
    assert "\n" not in out.getvalue()
    assert [line.split("  ")[-1] for line in drawn[2:]] == ["fetching tiny", "fetching tiny", "reading weights", ""]
    assert [line.count("█") for line in drawn[2:]] == [8, 15, 30, 0]


async def test_without_a_terminal_each_stage_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    out = io.StringIO()
    with caplog.at_level(logging.INFO):
        await show_loading(States([*STATES, RemoteState(state="ready")]), out)
    assert caplog.messages == ["loading: fetching tiny", "loading: reading weights"]
    assert out.getvalue() == ""
