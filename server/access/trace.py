"""W3C Trace Context (https://www.w3.org/TR/trace-context/): which trace a request belongs to.

Nothing here makes spans: what comes in is checked and passed on. What is malformed is ignored, as the specification
has it, and takes its tracestate with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_STATE_CHARS = 512
"""What everybody has to pass on. A longer state is left out: whole members may be dropped, and all are members."""

MAX_STATE_MEMBERS = 32
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\x20-\x7e]*)?\Z")
_MEMBER = re.compile(
    r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]\Z"
)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """`parent` is a traceparent of version 00, whatever version came; `state` a tracestate, or None."""

    parent: str
    state: str | None = None

    @property
    def trace_id(self) -> str:
        return self.parent[3:35]


def trace_of(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """Return the trace that headers (lower-case names) tell of, or None."""
    parents: list[bytes] = []
    states: list[bytes] = []
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value.strip(b" \t"))
        elif name == b"tracestate":
            states.append(value)
    if len(parents) != 1:  # of two, neither is known to be right
        return None
    parent = _checked_parent(parents[0])
    return None if parent is None else TraceContext(parent, _checked_state(b",".join(states)))


def _checked_parent(value: bytes) -> str | None:
    match = _PARENT.match(value)
    if match is None:
        return None
    version, trace_id, parent_id, flags, more = match.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    if not trace_id.strip(b"0") or not parent_id.strip(b"0"):
        return None
    # Of newer versions only this much is known, and it is passed on as what it is.
    known = flags if version == b"00" else b"%02x" % (int(flags, 16) & 1)
    return b"-".join((b"00", trace_id, parent_id, known)).decode()


def _checked_state(value: bytes) -> str | None:
    """Return the members, without the empty ones that are allowed. One that is wrong drops them all."""
    if not value or len(value) > MAX_STATE_CHARS or not value.isascii():
        return None
    members = [member for part in value.decode().split(",") if (member := part.strip(" \t"))]
    names = {member.partition("=")[0] for member in members}
    is_right = len(members) <= MAX_STATE_MEMBERS and len(names) == len(members)
    return ",".join(members) or None if is_right and all(map(_MEMBER.match, members)) else None
