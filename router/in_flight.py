"""What is under way on each target: claims that are taken and released in one place, and the engine's own reports.

A claim is one request on one target, of this process or of a peer that told of it. Every sum here changes only
with the set of claims, so that no claims means zero. Reports of the engine correct what is expected of a claim, never
the claims themselves. Time comes from the caller.
"""

from __future__ import annotations

from engine.protocol import EngineLoad

OWN = ""
"""The process that keeps these books, as the holder of a claim."""

STRANGER_TOKENS = 512
"""Prompt tokens of a request that is nobody's claim, where its engine counts requests alone and no claim shows more."""


class Claim:
    """One request on one target."""

    __slots__ = ("begun_s", "prompt_tokens", "uncached_tokens")

    def __init__(self, prompt_tokens: int, uncached_tokens: int, begun_s: float) -> None:
        self.prompt_tokens = prompt_tokens
        self.uncached_tokens = uncached_tokens
        self.begun_s = begun_s


ClaimKey = tuple[str, int]
"""(peer, lease id)"""


class TargetBooks:
    """The claims on one target, and its engine's last report.

    `settle_s` bounds the time from a dispatch to a report that includes it: a claim that was younger when the report
    came is counted beside it. A report older than `stale_s` is not believed, and the claims alone count.

    Engines of other makes count requests and no tokens: what of these is not claimed is taken to be like the claims.
    """

    def __init__(self, *, settle_s: float = 0.05, stale_s: float = 2.0) -> None:
        self.load: EngineLoad | None = None
        self.in_flight = 0
        self.in_flight_tokens = 0
        self._settle_s = settle_s
        self._stale_s = stale_s
        self._loaded_s = 0.0
        self._tells_tokens = True
        self._waiting_strange = self._decoding_strange = 0
        self._claims: dict[ClaimKey, Claim] = {}
        # Both in the order in which claims began. Every key of `_young` is one of `_unanswered`, which are all claims.
        self._unanswered: dict[ClaimKey, Claim] = {}
        self._young: dict[ClaimKey, Claim] = {}
        self._unanswered_uncached = self._unanswered_prompt = 0
        self._young_uncached = 0

    @property
    def unanswered(self) -> int:
        """Claims whose first output has not come."""
        return len(self._unanswered)

    def begin(self, key: ClaimKey, prompt_tokens: int, uncached_tokens: int, now_s: float) -> None:
        """Add a claim. One that is known already (a peer told of it twice) stays as it is."""
        if key in self._claims:
            return
        claim = self._claims[key] = self._unanswered[key] = self._young[key] = Claim(
            prompt_tokens, uncached_tokens, now_s
        )
        self.in_flight += 1
        self.in_flight_tokens += claim.prompt_tokens
        self._unanswered_prompt += claim.prompt_tokens
        self._unanswered_uncached += claim.uncached_tokens
        self._young_uncached += claim.uncached_tokens

    def answer(self, key: ClaimKey) -> None:
        """The prompt of this claim is computed. Unknown and answered claims are ignored."""
        claim = self._unanswered.pop(key, None)
        if claim is None:
            return
        self._unanswered_prompt -= claim.prompt_tokens
        self._unanswered_uncached -= claim.uncached_tokens
        self._settle(key)

    def end(self, key: ClaimKey) -> None:
        """Take a claim out. An unknown one is ignored: its end may have come before, with its peer's."""
        claim = self._claims.pop(key, None)
        if claim is None:
            return
        self.answer(key)
        self.in_flight -= 1
        self.in_flight_tokens -= claim.prompt_tokens

    def report(self, load: EngineLoad, now_s: float, *, tells_tokens: bool = True) -> None:
        """Take the engine's report: claims that it must have seen are in it now."""
        self.load = load
        self._tells_tokens = tells_tokens
        self._loaded_s = now_s
        for key, claim in list(self._young.items()):
            if now_s - claim.begun_s < self._settle_s:
                break
            self._settle(key)
        if not tells_tokens:
            self._find_strangers(load)

    def fresh_load(self, now_s: float) -> EngineLoad | None:
        return self.load if self.load is not None and now_s - self._loaded_s <= self._stale_s else None

    def queued_uncached_tokens(self, now_s: float) -> int:
        """Prompt tokens that the target has still to compute, as far as is known."""
        load = self.fresh_load(now_s)
        if load is None:
            return self._unanswered_uncached
        if not self._tells_tokens:
            return self._unanswered_uncached + self._waiting_strange
        return load.queued_uncached_tokens + self._young_uncached

    def view(self, coming_tokens: int, block_size: int, now_s: float) -> tuple[int, int, float]:
        """Return the prompt tokens still to be computed, the context of the sequences that decode, and the share of KV
        blocks in use when what is on its way and `coming_tokens` have been stored.

        Without a report the context is taken to be the prompts of those that have been answered, the share to be 0.
        """
        load = self.fresh_load(now_s)
        if load is None:
            return self._unanswered_uncached, self.in_flight_tokens - self._unanswered_prompt, 0.0
        if not self._tells_tokens:
            decoding = self._decoding_strange + self.in_flight_tokens - self._unanswered_prompt
            usage = load.kv_blocks_used / load.kv_blocks_total if load.kv_blocks_total else 0.0
            return self._unanswered_uncached + self._waiting_strange, decoding, min(1.0, usage)
        usage = 0.0
        if load.kv_blocks_total:
            coming_blocks = (self._young_uncached + coming_tokens) / block_size
            usage = min(1.0, (load.kv_blocks_used + coming_blocks) / load.kv_blocks_total)
        return load.queued_uncached_tokens + self._young_uncached, load.running_context_tokens, usage

    def drift(self, now_s: float) -> int | None:
        """Requests that the engine has beyond the claims: other clients', or a fault of these books if it stays."""
        load = self.fresh_load(now_s)
        if load is None:
            return None
        return load.running + load.waiting + load.waiting_kv - (self.in_flight - len(self._young))

    def _find_strangers(self, load: EngineLoad) -> None:
        """Note the prompt tokens that wait and that decode for requests which are nobody's claim. Later claims and ends
        are no news of these: they are counted when the report comes."""
        count = max(0, load.running + load.waiting - (self.in_flight - len(self._young)))
        tokens = self.in_flight_tokens // self.in_flight if self.in_flight else STRANGER_TOKENS
        waiting = min(count, load.waiting)
        self._waiting_strange, self._decoding_strange = waiting * tokens, (count - waiting) * tokens

    def check_integrity(self) -> None:
        """Raise AssertionError when a sum is not that of the claims. For tests."""
        assert self.in_flight == len(self._claims)
        assert self.in_flight_tokens == sum(claim.prompt_tokens for claim in self._claims.values())
        assert self._unanswered_uncached == sum(claim.uncached_tokens for claim in self._unanswered.values())
        assert self._unanswered_prompt == sum(claim.prompt_tokens for claim in self._unanswered.values())
        assert self._young_uncached == sum(claim.uncached_tokens for claim in self._young.values())
        assert self._young.keys() <= self._unanswered.keys() <= self._claims.keys()

    def _settle(self, key: ClaimKey) -> None:
        claim = self._young.pop(key, None)
        if claim is not None:
            self._young_uncached -= claim.uncached_tokens
