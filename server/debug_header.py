"""`X-Headrace-Debug`: asked for in a request, it tells in the response's head which engine was chosen, and by what.

Who is answered, the guard decides: it shows how many engines there are, and their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from router.decision import Decision

if TYPE_CHECKING:
    from server.openai.channel import Channel
    from server.service import Service

DEBUG_HEADER = b"x-headrace-debug"


def asks_for_debug(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name == DEBUG_HEADER and value.strip() == b"1" for name, value in headers)


def note_decisions(service: Service, request_id: str, channel: Channel) -> None:
    """Have the head of the response tell where the request goes, if its client is to be told."""
    if channel.record.debug:
        decisions = service.follow(request_id)
        channel.add_late_header(DEBUG_HEADER, lambda: described(decisions()))


def described(decisions: Sequence[Decision]) -> str:
    """Return the latest of the decisions about one choice, the oldest of which comes first."""
    if not decisions:
        return "attempts=0"
    last = decisions[-1]
    fields = {
        "target": last.target_id,
        "policy": last.policy,
        "hit_blocks": last.predicted_tokens // last.block_size,
        "prompt_blocks": last.prompt_tokens // last.block_size,
        "candidates": last.num_candidates,
        "attempts": len(decisions),
    }
    return "; ".join(f"{name}={value}" for name, value in fields.items())
