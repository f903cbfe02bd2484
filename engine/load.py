"""An engine's load: what it has done since it began, and what happens now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.kv.groups import KVGroups
from engine.protocol import EngineLoad
from engine.request import Request
from engine.scheduler import Scheduler


class Totals:
    """Cumulative counts. Tokens of prompts, of these from the cache, and of outputs; requests by how they ended.

    Steps with prompt tokens are counted as prefill, all others as decode: their tokens, their time in seconds, and of
    decode the context that they read.
    """

    __slots__ = (
        "cached_tokens",
        "decode_busy_s",
        "decode_context_tokens",
        "decode_tokens",
        "endings",
        "output_tokens",
        "prefill_busy_s",
        "prefill_tokens",
        "prompt_tokens",
        "steps",
    )

    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.prefill_tokens = 0
        self.prefill_busy_s = 0.0
        self.decode_tokens = 0
        self.decode_context_tokens = 0
        self.decode_busy_s = 0.0
        self.endings: Counter[str] = Counter()

    def add_prefill(self, tokens: int, busy_s: float) -> None:
        self.prefill_tokens += tokens
        self.prefill_busy_s += busy_s

    def add_decode(self, tokens: int, context_tokens: int, busy_s: float) -> None:
        self.decode_tokens += tokens
        self.decode_context_tokens += context_tokens
        self.decode_busy_s += busy_s


def load_of(
    scheduler: Scheduler, kv: KVGroups, totals: Totals, *, live: int, compiling: Iterable[Request], draining: bool
) -> EngineLoad:
    """Tell what happens now, at a cost that does not grow with the queue. `live` is how many requests have not ended,
    `compiling` those of them that wait for their grammar."""
    running, queued, context = len(scheduler.running), scheduler.queued_tokens, 0
    for request in scheduler.running:
        missing = len(request.tokens) - request.num_computed
        if missing > 1:
            queued += missing
        else:
            context += request.num_computed
    loading = [request for request in scheduler.port.loading_requests() if not request.finished]
    queued += sum(len(request.tokens) for request in loading)
    queued += sum(len(request.tokens) for request in compiling)
    waiting_kv = len(loading)
    return EngineLoad(
        running=running,
        waiting=live - running - waiting_kv,
        waiting_kv=waiting_kv,
        queued_uncached_tokens=queued,
        kv_blocks_used=kv.blocks_used,
        kv_blocks_total=kv.blocks_total,
        steps_total=totals.steps,
        preemptions_total=scheduler.preemptions,
        prompt_tokens_total=totals.prompt_tokens,
        cached_tokens_total=totals.cached_tokens,
        output_tokens_total=totals.output_tokens,
        requests_total=dict(totals.endings),
        prefill_tokens_total=totals.prefill_tokens,
        prefill_busy_s_total=totals.prefill_busy_s,
        draining=draining,
        running_context_tokens=context,
        decode_tokens_total=totals.decode_tokens,
        decode_context_tokens_total=totals.decode_context_tokens,
        decode_busy_s_total=totals.decode_busy_s,
    )
