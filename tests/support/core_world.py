"""An engine core over fakes, with every promise of the core checked after every operation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kv.event_log import KVEventLog
from engine.plan import NULL_BLOCK
from engine.protocol import EngineInfo, GenerateRequest, KVGroupSpec, SamplingParams, TokenLogprobs, TokenOutput
from kvstore.events.digest import Digest
from kvstore.events.held import HeldKeys
from kvstore.events.media import MEDIUM_OF, Tier
from kvstore.events.messages import BlockStored
from kvstore.keys import KeyChain, block_key
from router.values import NO_HIT, Query
from tests.support.fake_kv_port import FakeKVPort
from tests.support.fake_runner import FakeRunner, end_ids, expected_output, expected_prompt_logprobs
from tests.support.index_twin import IndexTwin
from tests.support.infos import engine_info
from tests.support.walk_grammars import WalkPool

VOCAB_SIZE = 50
EOS_ID = 0
FULL = KVGroupSpec()


def sliding(window_tokens: int) -> KVGroupSpec:
    return KVGroupSpec(kind="sliding_window", window_tokens=window_tokens)


def make_info(*, specs: Sequence[KVGroupSpec] = (FULL,), **fields: object) -> EngineInfo:
    small: dict[str, object] = {"block_size": 4, "max_running": 8, "vocab_size": VOCAB_SIZE, "eos_ids": (EOS_ID,)}
    return engine_info(**{**small, "kv_groups": tuple(specs), **fields})


def make_request(
    request_id: str = "r", prompt: Sequence[int] = (1, 2, 3), *, seed: int | None = 1, **fields: object
) -> GenerateRequest:
    """Return a request; fields of SamplingParams go there, all others to the request."""
    sampling = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__}
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=list(prompt),
        sampling=SamplingParams(seed=seed, **sampling),  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )


def rechained(event: BlockStored) -> list[bytes]:
    """Return the keys that follow from the event's tokens."""
    parent, size, keys = event.parent_block_hash or event.scope, event.block_size, []
    assert isinstance(parent, bytes)
    assert len(event.token_ids) == size * len(event.block_hashes)
    for start in range(0, len(event.token_ids), size):
        parent = block_key(parent, event.token_ids[start : start + size])
        keys.append(parent)
    return keys


@dataclass
class Attempt:
    """One accepted attempt, what it must say, and what it has said."""

    request: GenerateRequest
    tokens: list[int]
    reason: str
    emitted: list[int] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[-1].finish_reason if self.outputs else None


class World:
    """`step()` and the rest pass through to the core; wrong outputs and broken books raise."""

    def __init__(
        self,
        *,
        specs: Sequence[KVGroupSpec] = (FULL,),
        num_blocks: Sequence[int] = (65,),
        block_size: int = 4,
        max_running: int = 8,
        max_step_tokens: int = 64,
        max_model_len: int = 256,
        max_waiting: int = 1000,
        in_flight: int = 1,
        max_late: int = 0,
        row_error: float = 0.0,
        prefix_cache: bool = True,
        with_port: bool = False,
        port_late: int = 3,
        port_fail: float = 0.0,
        port_hold: float = 0.5,
        port_stored: int = 10_000,
        port_slow_looks: bool = False,
        grammars_late: int | None = None,
        seed: int = 0,
        check: bool = True,
    ) -> None:
        rng = random.Random(seed)
        self.runner = FakeRunner(
            specs,
            block_size,
            vocab_size=VOCAB_SIZE,
            max_in_flight=in_flight,
            max_late=max_late,
            row_error=row_error,
            rng=rng,
        )
        self.port = None
        if with_port:
            self.port = FakeKVPort(
                self.runner.memory,
                rng,
                port_late,
                port_fail,
                port_hold,
                max_stored=port_stored,
                slow_looks=port_slow_looks,
            )
        self.grammars = None if grammars_late is None else WalkPool(VOCAB_SIZE, rng, grammars_late)
        config = EngineConfig(
            max_step_tokens=max_step_tokens,
            max_waiting=max_waiting,
            in_flight_steps=in_flight,
            prefix_cache=prefix_cache,
        )
        self.info = make_info(specs=specs, block_size=block_size, max_model_len=max_model_len, max_running=max_running)
        self.windows = [spec.window_tokens for spec in specs]
        # What the events add up to, beside what the pools really have.
        self.event_log = KVEventLog(self.windows, block_size)
        self.event_log.enabled = True
        self.told = HeldKeys()
        self.now_s = 100.0
        self.wall_ahead_s = 0.0
        self.core = EngineCore(
            self.info,
            config,
            self.runner,
            num_blocks,
            self.port,
            clock=lambda: self.now_s,
            wall_clock=lambda: self.now_s + self.wall_ahead_s,
            event_log=self.event_log,
            grammars=self.grammars,  # type: ignore[arg-type]
        )
        pools = self.core.kv.pools
        self.runner.is_published = lambda group, block: pools[group].key_of(block) is not None
        alone = self.core.kv.max_sequence_tokens
        self.window = max_model_len if alone is None else min(alone, max_model_len)
        self.row_error = row_error
        self.attempts: dict[tuple[str, int], Attempt] = {}
        self._check = check

    def submit(self, request: GenerateRequest) -> Attempt:
        """Submit, and compute from the request alone what the outputs must be. The request must have a seed."""
        self.core.submit(request)
        assert request.sampling.seed is not None
        tokens, reason = expected_output(
            request, request.sampling.seed, vocab_size=VOCAB_SIZE, eos_ids=(EOS_ID,), window=self.window
        )
        attempt = Attempt(request, tokens, reason, emitted=list(request.resume_ids))
        self.attempts[request.request_id, request.attempt] = attempt
        self.check()
        return attempt

    def step(self) -> list[TokenOutput]:
        outputs = self.core.step()
        self.now_s += 0.01
        for output in outputs:
            self._take(output)
        self.check()
        return outputs

    def run(self, limit: int = 5000) -> None:
        """Step until nothing is left; everything must have come back then."""
        steps = 0
        while self.core.has_work:
            self.step()
            steps += 1
            assert steps < limit, "the core does not come to an end"
        self.check_events()
        unfinished = [key for key, attempt in self.attempts.items() if attempt.finish_reason is None]
        assert not unfinished, f"no terminal output for {unfinished}"
        assert self.core.kv.blocks_used == 0, "blocks did not come back"
        load = self.core.load()
        assert (load.running, load.waiting, load.waiting_kv) == (0, 0, 0)

    def check_events(self) -> None:
        """Take what was told since the last time: it must add up to the prefixes that all groups have."""
        events = self.event_log.take()
        for event in events:
            if isinstance(event, BlockStored):
                assert event.medium == MEDIUM_OF["device_end"] or event.block_hashes == rechained(event), (
                    "a block's key is not that of its tokens"
                )
        self.told.apply(events)
        pools = self.core.kv.pools
        full = [pool for pool, window in zip(pools, self.windows, strict=True) if window is None] or pools
        held = set.intersection(*({pool.key_of(block) for block in range(pool.num_blocks)} - {None} for pool in full))
        tier: Tier = "device_run" if None in self.windows and any(self.windows) else "device"
        told = self.told.by_tier
        assert told.get(tier, set()) == held, "events and pools differ"
        assert {name: keys for name, keys in told.items() if keys} == {
            name: set(keys) for name, keys in self.event_log.content().items() if keys
        }
        for name, keys in told.items():
            assert self.told.digests.get(MEDIUM_OF[name], Digest()) == Digest.of(keys)
        self.check_claims()

    def check_claims(self) -> None:
        """What a router may claim for a prompt is what the engine can serve; the same, unless all groups slide or a
        window ends at a block's first token."""
        size, told, clock = self.info.block_size, self.told.by_tier, lambda: 0.0
        twin = IndexTwin(0, clock)
        twin.add_target("t")
        for tier, stored in told.items():
            twin.apply("t", stored=list(stored), tier=tier)
        exact = None in self.windows and all(window is None or window % size != 1 for window in self.windows)
        for attempt in list(self.attempts.values())[-5:]:
            tokens = attempt.request.prompt_ids + attempt.tokens
            keys = KeyChain(attempt.request.cache_scope, size).extend(tokens)
            # One token more than the blocks have: nothing is computed again for its logits.
            served = self.core.kv.match(keys, len(keys) * size + 1).num_blocks
            query = Query(request_id="q", prompt_tokens=len(keys) * size + 1, keys=keys, block_size=size)
            claimed = twin.lookup(query).get("t", NO_HIT).tokens // size
            assert claimed == served if exact and size > 1 else claimed <= served, "a claim that nobody can serve"

    def check(self) -> None:
        if not self._check:
            return
        self.core.check_integrity()
        pools = self.core.kv.pools
        for launched in self.runner.in_flight:
            for pool, blocks in zip(pools, launched.blocks, strict=True):
                assert all(b == NULL_BLOCK or pool.users(b) > 0 for b in blocks), "a block in flight is free"

    def _take(self, output: TokenOutput) -> None:
        attempt = self.attempts[output.request_id, output.attempt]
        request = attempt.request
        assert attempt.finish_reason is None, "an output behind the terminal one"
        assert output.offset == len(attempt.emitted), "offsets have a gap or overlap"
        if not attempt.outputs and output.finish_reason in (None, "stop", "length") and output.token_ids:
            assert output.cached is not None, "the first output tells what was cached"
            if request.prompt_logprobs is not None:
                assert output.prompt_logprobs == expected_prompt_logprobs(request.prompt_ids)
        attempt.outputs.append(output)
        attempt.emitted += output.token_ids
        assert attempt.emitted == attempt.tokens[: len(attempt.emitted)], "wrong tokens"
        if request.sampling.logprobs is not None:
            assert len(output.logprobs or ()) == len(output.token_ids)
        else:
            assert output.logprobs is None
        if output.finish_reason is None:
            return
        assert output.timings is not None
        if output.finish_reason == "error":
            assert self.row_error > 0
            assert output.error
        if output.finish_reason in ("stop", "length") and output.token_ids:
            assert attempt.emitted == attempt.tokens, "ended early"
            assert output.finish_reason == attempt.reason
            ends = end_ids(request, (EOS_ID,))
            by_token = attempt.reason == "stop" and attempt.tokens[-1] in ends
            assert output.stop_token == (attempt.tokens[-1] if by_token else None)
