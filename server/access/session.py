"""Which conversation a request belongs to, for policies that keep conversations together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

SESSION_HEADER = b"x-session-id"
MAX_SESSION_CHARACTERS = 256
BODY_FIELDS = ("prompt_cache_key", "user")
"""Of these the first that is there, when no header says it."""


def session_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return what the client's header names, or None."""
    for name, value in headers:
        if name == SESSION_HEADER:
            return _bounded(value.decode("latin-1"))
    return None


def session_of_body(extra: Mapping[str, object] | None) -> str | None:
    """Return what the fields of a body name that are not about its answer."""
    for name in BODY_FIELDS:
        value = (extra or {}).get(name)
        if isinstance(value, str) and (session := _bounded(value)) is not None:
            return session
    return None


def _bounded(text: str) -> str | None:
    """What is longer is no name of a conversation; its beginning would do as well."""
    return text.strip()[:MAX_SESSION_CHARACTERS] or None
