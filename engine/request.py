"""What the engine keeps of one accepted request. Knows its tokens and its place in the loop, not how it is scheduled.

One arithmetic, no phases: a request owns `num_tokens` tokens (prompt, resumed, sampled; the `pending` last ones are
sampled by steps in flight and still on the device), and each step computes the next of them. `num_computed` counts
the positions that launched steps cover, `num_completed` those of steps that have come back.
"""

from __future__ import annotations

import enum
import sys
from array import array
from collections.abc import Sequence

from engine.grammar.base import Matcher
from engine.kv.groups import Tables
from engine.protocol import CachedTokens, FinishReason, GenerateRequest, KVTier, TokenLogprobs
from kvstore.keys import KeyChain


class RequestState(enum.Enum):
    """COMPILING has nothing, and the scheduler does not know it: its grammar is not there yet. WAITING has nothing, or
    is preempted and gives up what steps in flight still use. WAITING_KV has blocks that a KVPort fills. RUNNING has a
    slot. FINISHED has had its terminal output; its blocks may still be in use."""

    COMPILING = "compiling"
    WAITING = "waiting"
    WAITING_KV = "waiting_kv"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """Mutable, owned by the engine's thread."""

    __slots__ = (
        "announced",
        "arrived_s",
        "block_size",
        "cached",
        "capacity",
        "chain",
        "end_ids",
        "end_set",
        "first_token_s",
        "keep_tokens",
        "last_step",
        "matcher",
        "max_total_tokens",
        "min_tokens",
        "next_full",
        "num_completed",
        "num_computed",
        "on_device",
        "order",
        "output_started",
        "pending",
        "prefill_only",
        "prompt_len",
        "prompt_logprobs",
        "published_blocks",
        "publishes",
        "queued_tokens",
        "sent_capacity",
        "slot",
        "spec",
        "started_s",
        "state",
        "tables",
        "tokens",
        "write_start",
    )

    def __init__(
        self,
        spec: GenerateRequest,
        *,
        arrival: int,
        arrived_s: float,
        max_total_tokens: int,
        eos_ids: tuple[int, ...],
        block_size: int,
    ) -> None:
        """`spec` is validated and has a seed. `max_total_tokens` bounds prompt and output together; a request that may
        have no output computes its prompt and ends."""
        self.spec = spec
        self.order = (spec.priority, arrival)
        self.state = RequestState.WAITING
        # Compact, and nothing for the garbage collector to walk through.
        self.tokens = array("I", spec.prompt_ids)
        self.tokens.extend(spec.resume_ids)
        self.prompt_len = len(spec.prompt_ids)
        self.prefill_only = max_total_tokens <= self.prompt_len
        self.max_total_tokens = max(max_total_tokens, self.prompt_len + 1)
        self.pending = 0
        # Tokens that end the request, and that min_tokens forbids before its time.
        model_ends = () if spec.sampling.ignore_eos else eos_ids
        self.end_ids = tuple(dict.fromkeys((*model_ends, *spec.sampling.stop_token_ids)))
        self.end_set = frozenset(self.end_ids)
        self.min_tokens = spec.sampling.min_tokens
        self.keep_tokens: int | None = None
        # Stands behind `tokens`, in front of those that are pending.
        self.matcher: Matcher | None = None

        # Times of the monotonic clock.
        self.arrived_s = arrived_s
        self.started_s: float | None = None
        self.first_token_s: float | None = None

        # Identity of its blocks. `publishes` is off while a reset of the prefix cache is newer than the admission.
        self.block_size = block_size
        self.chain = KeyChain(spec.cache_scope, block_size)
        self.publishes = True
        self.queued_tokens = 0
        self.cached: CachedTokens | None = None

        # Prompt token 0 has no logprobs. None when none are wanted.
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if spec.prompt_logprobs is None else [None]
        self.output_started = False

        self.last_step = -1
        self.leave_device()

    def leave_device(self) -> None:
        """Forget slot and blocks, which somebody else has released. Tokens stay: they are right wherever they run."""
        self.slot = -1
        self.announced = False
        self.on_device = False
        self.tables: Tables = []
        # Tokens that the tables have blocks for, and that of them which the runner knows.
        self.capacity = 0
        self.sent_capacity = 0
        self.num_computed = 0
        self.num_completed = 0
        self.write_start = 0
        self.published_blocks = 0
        self.next_full = sys.maxsize

    def start_behind(self, num_blocks: int, position: int) -> None:
        """Take the first `num_blocks` of the tables as computed and published; go on at `position`.

        A hit of the whole sequence goes on at its last token, which is inside a published block: `write_start` keeps
        that block as it is.
        """
        self.num_computed = self.num_completed = position
        self.write_start = num_blocks * self.block_size if position < num_blocks * self.block_size else 0
        self.published_blocks = num_blocks
        self.next_full = (num_blocks + 1) * self.block_size

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def num_outputs(self) -> int:
        """Output tokens that the host knows, resumed ones included."""
        return len(self.tokens) - self.prompt_len

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def preempted_in_flight(self) -> bool:
        """Preempted, but steps in flight still use its slot and blocks."""
        return self.state is RequestState.WAITING and self.slot >= 0

    @property
    def prompt_logprobs_missing(self) -> bool:
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len

    @property
    def skippable_tokens(self) -> int:
        """How many leading positions need no computing when their KV is cached: not the last one, whose logits are
        sampled, and none whose logits still owe a prompt logprob."""
        if self.prompt_logprobs is not None and self.prompt_logprobs_missing:
            return len(self.prompt_logprobs) - 1
        return self.num_tokens - 1

    @property
    def kept_tokens(self) -> int:
        """Leading tokens whose KV is computed and belongs to the answer."""
        keep = len(self.tokens) if self.keep_tokens is None else self.keep_tokens
        return min(keep, self.num_completed)

    def extend(self, token_ids: Sequence[int]) -> FinishReason | None:
        """Add sampled tokens up to the one that ends the request; return why it ends, if it does.

        An end token, or the last of a grammar, wins over the length limit. min_tokens gates end tokens by output index,
        as the sampler does. Raises GrammarError, before the token at fault is added.
        """
        for token in token_ids:
            ends = token in self.end_set and self.num_outputs >= self.min_tokens
            complete = not ends and self.matcher is not None and self.matcher.advance(token)
            self.tokens.append(token)
            if ends or complete:
                return "stop"
            if len(self.tokens) >= self.max_total_tokens:
                return "length"
        return None

    def add_prompt_logprobs(self, start: int, entries: tuple[TokenLogprobs, ...]) -> None:
        """Keep the logprobs of the tokens at start + 1 and on. Positions seen before, or behind the prompt, drop out:
        a resumed request computes some positions twice."""
        if self.prompt_logprobs is None:
            return
        have = len(self.prompt_logprobs)
        self.prompt_logprobs.extend(entries[max(0, have - start - 1) : max(0, self.prompt_len - start - 1)])

    def count_cached(self, device_tokens: int, loaded_tokens: int = 0, tiers: Sequence[KVTier] = ()) -> None:
        """Note which prompt tokens the first admission found; later ones find the request's own blocks. `tiers` has one
        of each block that was loaded."""
        if self.cached is not None:
            return
        device = min(device_tokens, self.prompt_len)
        left = min(device_tokens + loaded_tokens, self.prompt_len) - device
        counts: dict[str, int] = {"device": device}
        for tier in tiers:
            tokens = min(left, self.block_size)
            counts[tier] = counts.get(tier, 0) + tokens
            left -= tokens
        self.cached = CachedTokens(**counts)
