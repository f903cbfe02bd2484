"""Grammar back ends by name. A back end is imported when it is opened, not before."""

from __future__ import annotations

from engine.errors import ConfigError
from engine.grammar.base import Backend, OpenBackend, Vocabulary

DEFAULT = "llguidance"


def _open_llguidance(vocabulary: Vocabulary) -> Backend:
    from engine.grammar.llguidance_backend import LLGuidanceBackend

    return LLGuidanceBackend(vocabulary)


BACKENDS: dict[str, OpenBackend] = {DEFAULT: _open_llguidance}


def open_backend(name: str, vocabulary: Vocabulary) -> Backend:
    if name not in BACKENDS:
        raise ConfigError(f"grammar back end {name!r} is not one of {', '.join(BACKENDS)}")
    return BACKENDS[name](vocabulary)
