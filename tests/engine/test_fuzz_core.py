"""Random lives of requests, checked after every operation (tests/support/core_world.py says what for)."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.errors import PressureError, RequestError
from engine.protocol import GenerateRequest, Grammar, SamplingParams
from tests.support.core_world import FULL, VOCAB_SIZE, World, sliding

GROUP_MIXES = (
    [FULL],
    [FULL],
    [FULL, sliding(7)],
    [sliding(2)],
    [sliding(9), FULL, sliding(5)],
)


def random_world(rng: random.Random) -> World:
    specs = rng.choice(GROUP_MIXES)
    block_size = rng.choice((1, 2, 4, 4, 8))
    tokens = rng.choice((24, 40, 80, 200))
    with_port = rng.random() < 0.5
    return World(
        specs=specs,
        num_blocks=[max(3, tokens // block_size) + 1 + rng.randrange(3) for _ in specs],
        block_size=block_size,
        max_running=rng.randint(1, 9),
        max_step_tokens=rng.choice((1, 3, 8, 16, 64)),
        max_model_len=rng.choice((32, 64)),
        max_waiting=rng.choice((3, 20)),
        in_flight=rng.randint(1, 4),
        max_late=rng.randint(0, 3),
        row_error=rng.choice((0.0, 0.0, 0.01)),
        prefix_cache=with_port or rng.random() < 0.8,
        with_port=with_port,
        port_late=rng.choice((0, 3, 10)),
        port_fail=rng.choice((0.0, 0.5)),
        port_hold=rng.choice((0.0, 0.5, 1.0)),
        port_stored=rng.choice((5, 1000)),
        port_slow_looks=rng.random() < 0.5,
        grammars_late=rng.choice((0, 3)),
        seed=rng.getrandbits(32),
    )


class Fuzz:
    """One world under random operations."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = random_world(self.rng)
        self.documents = [[self.rng.randrange(1, VOCAB_SIZE) for _ in range(40)] for _ in range(4)]
        self.live: list[tuple[str, int]] = []
        self.names = 0
        self.counts: Counter[str] = Counter()

    def run(self, operations: int) -> None:
        choices = (self.step, self.submit, self.submit_group, self.abort, self.finish, self.retry, self.pass_time)
        weights = (55, 22, 2, 4, 4, 2, 2)
        for number in range(operations):
            operation = self.rng.choices(choices, weights)[0]
            operation()
            self.counts[operation.__name__] += 1
            if number % 400 == 399:
                self.occasionally()
        self.drain()

    def occasionally(self) -> None:
        self.world.check_events()
        if self.rng.random() < 0.3:
            self.world.core.reset_prefix_cache()
            self.world.check()
        elif self.rng.random() < 0.5:
            self.drain()

    def drain(self) -> None:
        self.world.run()
        for attempt in self.world.attempts.values():
            self.counts[f"ended {attempt.finish_reason}"] += 1
        self.world.attempts.clear()
        self.live.clear()

    def step(self) -> None:
        self.world.step()
        if self.rng.random() < 0.05:
            self.live = [key for key in self.live if self.world.attempts[key].finish_reason is None]

    def prompt(self) -> list[int]:
        rng = self.rng
        prompt = self.rng.choice(self.documents)[: rng.randint(1, 36)]
        if self.live and rng.random() < 0.3:  # the next turn of a conversation
            attempt = self.world.attempts[rng.choice(self.live)]
            prompt = attempt.request.prompt_ids + attempt.emitted
        if rng.random() < 0.5:
            prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
        return prompt[:60]

    def submit(self) -> None:
        self.names += 1
        self._submit(self._request(f"r{self.names}"))

    def submit_group(self) -> None:
        self.names += 1
        prompt = self.prompt()
        for choice in range(self.rng.randint(2, 4)):
            self._submit(self._request(f"r{self.names}.{choice}", prompt, group_id=f"r{self.names}"))

    def _request(self, name: str, prompt: list[int] | None = None, group_id: str | None = None) -> GenerateRequest:
        rng = self.rng
        max_tokens = rng.choice((None, 1, 2, rng.randint(1, 30)))
        sampling = SamplingParams(
            seed=rng.getrandbits(63) - 2**62,
            max_tokens=max_tokens,
            min_tokens=0 if rng.random() < 0.7 else rng.randint(0, max_tokens or 5),
            stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice((0, 0, 2)))),
            ignore_eos=rng.random() < 0.3,
            logprobs=rng.choice((None, None, 0, 2)),
        )
        return GenerateRequest(
            request_id=name,
            prompt_ids=prompt or self.prompt(),
            sampling=sampling,
            group_id=group_id,
            priority=rng.choice((0, 0, 0, -1, 1)),
            deadline_unix_s=self.world.now_s + rng.uniform(-0.1, 3.0) if rng.random() < 0.1 else None,
            prompt_logprobs=rng.choice((None,) * 6 + (1,)),
            cache_scope=bytes([rng.choice((0, 0, 0, 1))] * 32),
            grammar=Grammar("regex", str(rng.randrange(5))) if rng.random() < 0.4 else None,
        )

    def _submit(self, request: GenerateRequest) -> None:
        try:
            self.world.submit(request)
        except PressureError:
            self.counts["refused: full"] += 1
        except RequestError:
            self.counts["refused: bad"] += 1
        else:
            self.live.append((request.request_id, request.attempt))

    def _any(self) -> tuple[str, int] | None:
        return self.rng.choice(self.live) if self.live else None

    def abort(self) -> None:
        if key := self._any():
            self.world.core.abort(key[0])
            self.world.check()

    def finish(self) -> None:
        if key := self._any():
            self.world.core.finish(key[0], self.rng.randint(0, len(self.world.attempts[key].emitted)))
            self.world.check()

    def retry(self) -> None:
        """Another attempt goes on where the client's stream stands."""
        if not (key := self._any()):
            return
        attempt = self.world.attempts[key]
        request = attempt.request
        if (request.request_id, request.attempt + 1) in self.world.attempts or attempt.finish_reason is not None:
            return
        self._submit(
            GenerateRequest(
                request_id=request.request_id,
                prompt_ids=request.prompt_ids,
                sampling=request.sampling,
                attempt=request.attempt + 1,
                resume_ids=list(attempt.emitted),
                cache_scope=request.cache_scope,
                grammar=request.grammar,
            )
        )

    def pass_time(self) -> None:
        self.world.now_s += self.rng.random()


def run_fuzz(seed: int, operations: int) -> Counter[str]:
    """Return what happened. A failure names the seed that repeats it."""
    fuzz = Fuzz(seed)
    try:
        fuzz.run(operations)
    except BaseException as error:
        error.add_note(f"fuzz seed {seed}")
        raise
    load = fuzz.world.core.load()
    assert fuzz.world.grammars is not None
    fuzz.counts["masks"] = fuzz.world.grammars.masks_made
    fuzz.counts["preempted"] = load.preemptions_total
    fuzz.counts["cached tokens"] = load.cached_tokens_total
    if fuzz.world.port is not None:
        fuzz.counts["loads"] = fuzz.world.port.loads_ended
        fuzz.counts["blocks loaded"] = fuzz.world.port.blocks_loaded
        fuzz.counts["holds"] = fuzz.world.port.holds_ended
    return fuzz.counts


def test_random_lives_keep_every_promise() -> None:
    total: Counter[str] = Counter()
    for seed in range(50):
        total += run_fuzz(seed, operations=1000)
    for event in ("preempted", "cached tokens", "blocks loaded", "holds", "ended abort", "ended error", "ended stop"):
        assert total[event] > 50, f"the fuzz hardly saw: {event}"
    assert total["ended length"] + total["ended stop"] > 3000
    assert total["masks"] > 5000


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_million_random_operations_keep_every_promise() -> None:
    total: Counter[str] = Counter()
    for seed in range(1000, 1250):
        total += run_fuzz(seed, operations=4000)
    print(dict(total))
    assert total["ended length"] + total["ended stop"] > 60_000
