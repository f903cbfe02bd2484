"""The priority that a request's header says, for clients that cannot add fields to a body. A field of the body wins."""

from __future__ import annotations

import re
from collections.abc import Iterable

from engine.errors import RequestError

PRIORITY_HEADER = b"x-vllm-priority"
MAX_SHOWN_CHARACTERS = 40
_NUMBER = re.compile(r"[+-]?[0-9]{1,10}")


def priority_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return what the client's header says, unchecked, or None."""
    for name, value in headers:
        if name == PRIORITY_HEADER:
            return value.decode("latin-1").strip()
    return None


def chosen_priority(own: int | None, header: str | None) -> int:
    """Return a request's priority: the body's, else the header's, else 0. Raises RequestError."""
    if own is not None:
        return own
    return 0 if header is None else read_priority(header)


def read_priority(written: str) -> int:
    """Return a header's number. Raises RequestError."""
    if not _NUMBER.fullmatch(written) or not -(2**31) <= int(written) < 2**31:
        name, shown = PRIORITY_HEADER.decode(), written[:MAX_SHOWN_CHARACTERS]
        raise RequestError(f"The header {name} must be a whole number of 32 bits (got {shown!r}).", param=name)
    return int(written)
