"""`truncate_prompt_tokens`: how much of a prompt stays. Its end does, which is where the question is."""

from __future__ import annotations

from engine.errors import RequestError
from engine.protocol import EngineInfo
from engine.validation import sequence_window


def kept_tokens(wanted: int | None, info: EngineInfo, max_tokens: int | None) -> int | None:
    """Return how many tokens of a prompt stay at most, or None for all. Raises RequestError.

    -1 leaves room for `max_tokens`, or for one token where the request does not say.
    """
    window = sequence_window(info)
    if wanted is None or 0 < wanted <= window:
        return wanted
    if wanted > 0:
        raise RequestError(
            f"'truncate_prompt_tokens' may be {window} at most, which is the model's window.",
            param="truncate_prompt_tokens",
            value=wanted,
        )
    return max(1, window - max(1, max_tokens or 1))
