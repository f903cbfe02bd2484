"""What a person sees while the model loads: a bar on a terminal, otherwise one log line for each stage."""

from __future__ import annotations

import logging
import sys
from typing import Protocol, TextIO

from engine.wire.remote_state import RemoteState

log = logging.getLogger(__name__)

BAR_WIDTH = 30


class Loading(Protocol):
    """The part of RemoteEngine that is needed here."""

    def state(self) -> RemoteState: ...

    async def wait_changed(self) -> RemoteState: ...


async def show_loading(engine: Loading, stream: TextIO | None = None) -> None:
    """Return when the engine loads no longer, whatever came of it. `stream` is stderr when None."""
    out = stream or sys.stderr
    view = _Bar(out) if out.isatty() else _Lines()
    try:
        while (state := engine.state()).state == "loading":
            view.show(state.progress, state.message)
            await engine.wait_changed()
    finally:
        view.clear()


class _Bar:
    """One line that is drawn over and over, and leaves nothing behind."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, progress: float, message: str) -> None:
        filled = round(BAR_WIDTH * min(max(progress, 0.0), 1.0))
        bar = "█" * filled + "░" * (BAR_WIDTH - filled)
        self._draw(f"{bar} {progress:4.0%}  {message}")

    def clear(self) -> None:
        self._draw("")

    def _draw(self, text: str) -> None:
        self._stream.write(f"\r\x1b[2K{text}")
        self._stream.flush()


class _Lines:
    """Progress within a stage is for /health; a log wants to know the stages."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, progress: float, message: str) -> None:
        if message and message != self._last:
            log.info("loading: %s", message)
        self._last = message

    def clear(self) -> None:
        pass
