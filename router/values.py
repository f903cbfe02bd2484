"""What policies decide from and what they answer: plain values, no clocks, no sockets, no engines.

The unit of routing is a target: one DP rank of one worker. Everything counted in tokens is of prompts unless it says
otherwise; rates are tokens/s, times seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

Role = Literal["both", "prefill", "decode"]
TargetState = Literal["starting", "ready", "draining", "dead"]
Tier = Literal["device", "ram", "disk", "remote"]


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy may know of a request.

    `keys` are the chain of block keys of the prompt's full blocks (kvstore/keys.py), `block_size` tokens each.
    `output_tokens` is how many more may follow at most, None when unknown. `session_id` names a conversation.
    """

    request_id: str
    prompt_tokens: int
    keys: Sequence[bytes] = ()
    block_size: int = 64
    output_tokens: int | None = None
    session_id: str | None = None


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """Leading tokens of a prompt that a target need not compute, by the tier that they would come from.

    `speculative` of them (within `device`) are expected there only because of requests that were just sent.
    """

    device: int = 0
    ram: int = 0
    disk: int = 0
    remote: int = 0
    speculative: int = 0

    @property
    def tokens(self) -> int:
        return self.device + self.ram + self.disk + self.remote


NO_HIT = Hit()


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One eligible target at the moment of a decision.

    `queued_uncached_tokens` are prompt tokens to be computed before this request's: the engine's last report, corrected
    by what was dispatched since. `in_flight` counts requests under way, `in_flight_tokens` all their prompt tokens;
    `unanswered` of them have had no output yet.
    `kv_usage` in [0, 1] is projected with this request. `decode_tokens` is the context of the sequences that decode.
    `prefill_rate` and `decode_rate` are measured for this target; `fetch_rates` are tokens/s by tier.
    """

    target_id: str
    in_flight: int = 0
    in_flight_tokens: int = 0
    unanswered: int = 0
    queued_uncached_tokens: float = 0.0
    decode_tokens: float = 0.0
    kv_usage: float = 0.0
    prefill_rate: float = 1.0
    decode_rate: float = 1.0
    fetch_rates: dict[Tier, float] = {}
    hit: Hit = NO_HIT


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate's cost (the least wins; seconds where the policy predicts time) and what it is made of."""

    target_id: str
    cost: float
    reasons: dict[str, float] = {}


class Policy(Protocol):
    """A cost function over candidates. It may keep a state of its own, such as a ring or a counter."""

    @property
    def name(self) -> str: ...

    def score(self, query: Query, candidates: Sequence[Candidate]) -> list[Score]:
        """Return one score per candidate, in their order."""
        ...
