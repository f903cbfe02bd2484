"""What a client knows of its engine's state."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.errors import DrainingError, EngineDiedError, HeadraceError, LoadingError
from engine.protocol import EngineInfo


class RemoteState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the engine. "loading" until it was reached once, "dead" whenever it is lost after that.

    `progress` of loading is in [0, 1]. `error` says why the engine failed, also after its process is gone.
    `incarnation` is of the engine that is connected. `info` is set when "ready" or "draining".
    """

    state: Literal["loading", "ready", "draining", "failed", "dead"] = "loading"
    progress: float = 0.0
    message: str = ""
    error: HeadraceError | None = None
    incarnation: str | None = None
    info: EngineInfo | None = None

    def refusal(self) -> HeadraceError:
        """Return why an engine in this state takes no request."""
        match self.state:
            case "loading" | "ready":
                return LoadingError(self.message or "The model is loading.", progress=self.progress)
            case "draining":
                return DrainingError("The engine is shutting down.")
        return EngineDiedError(self.message or "The engine is gone.")
