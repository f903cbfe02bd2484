"""Several outputs of one attempt as one: what a slow receiver gets. Knows no peers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from engine.protocol import TokenOutput


def merge_outputs(outputs: Sequence[TokenOutput]) -> TokenOutput:
    """Return one output equal to `outputs`: contiguous, of one request and attempt, in order, not empty.

    What comes once at the start is the first output's, what comes once at the end the last one's. What was cached comes
    with either.
    """
    first, last = outputs[0], outputs[-1]
    if first is last:
        return first
    has_logprobs = any(output.logprobs is not None for output in outputs)
    return TokenOutput(
        request_id=first.request_id,
        attempt=first.attempt,
        offset=first.offset,
        token_ids=list(chain.from_iterable(output.token_ids for output in outputs)),
        finish_reason=last.finish_reason,
        stop_token=last.stop_token,
        logprobs=list(chain.from_iterable(output.logprobs or () for output in outputs)) if has_logprobs else None,
        cached=next((output.cached for output in outputs if output.cached is not None), None),
        prompt_logprobs=first.prompt_logprobs,
        timings=last.timings,
        error=last.error,
        error_code=last.error_code,
        kv_ticket=last.kv_ticket,
    )
