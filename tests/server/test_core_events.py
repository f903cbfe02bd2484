"""A real engine process with a real, tiny model tells what it caches, and the index predicts what it will answer."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest
import zmq

from engine.config import EngineConfig
from engine.protocol import CachedTokens, GenerateRequest, SamplingParams
from engine.wire.client import RemoteEngine
from engine.wire.merge import merge_outputs
from kvstore.events.subscriber import Socket
from kvstore.keys import PUBLIC_SCOPE, KeyChain
from router.feed import IndexFeed
from router.hit_check import HitCheck
from router.index import PrefixIndex
from router.values import NO_HIT, Query
from tests.support.scripted_engine import engine_process
from tests.support.tiny_models import write_tiny_llama
from tests.support.until import until

BLOCK_SIZE = 16
TARGET = "worker/0"


@pytest.fixture
def context() -> Iterator[zmq.Context[Socket]]:
    with zmq.Context[Socket]() as context:
        yield context


def query(prompt: list[int]) -> Query:
    keys = KeyChain(PUBLIC_SCOPE, BLOCK_SIZE).extend(prompt)
    return Query(request_id="q", prompt_tokens=len(prompt), keys=keys, block_size=BLOCK_SIZE)


class Conversations:
    """Asks a random one of a few growing conversations; answers and predictions go through the closed loop."""

    def __init__(self, engine: RemoteEngine, feed: IndexFeed, check: HitCheck) -> None:
        self._engine, self._feed, self._check = engine, feed, check
        self._rng = random.Random(5)
        self._texts = [[10 + number] * 20 for number in range(3)]
        self.asked = 0

    async def ask(self) -> tuple[int, CachedTokens]:
        """Return predicted and cached tokens."""
        text = self._rng.choice(self._texts)
        text += [self._rng.randrange(10, 200) for _ in range(self._rng.randint(1, 40))]
        predicted = self._feed.index.lookup(query(text)).get(TARGET, NO_HIT)
        self.asked += 1
        request = GenerateRequest(
            request_id=f"r{self.asked}",
            prompt_ids=list(text),
            sampling=SamplingParams(seed=1, max_tokens=9, ignore_eos=True),
        )
        answer = merge_outputs([output async for output in self._engine.generate(request)])
        assert answer.cached is not None
        self._check.observe(TARGET, predicted, answer.cached, BLOCK_SIZE)
        text += answer.token_ids
        # The last token's KV is not computed.
        full = query(text[:-1])
        tokens = len(full.keys) * BLOCK_SIZE
        await until(
            lambda: self._feed.index.lookup(full).get(TARGET, NO_HIT).device >= min(tokens, full.prompt_tokens - 1),
            "what was just computed is known",
        )
        return predicted.tokens, answer.cached


async def test_predictions_are_what_the_engine_finds_cached_also_after_its_death(
    tmp_path: Path, context: zmq.Context[Socket]
) -> None:
    config = EngineConfig(
        model=str(write_tiny_llama(tmp_path / "model")),
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=8 << 20,
        threads=1,
    )
    addresses = {"events_address": f"ipc://{tmp_path}/events", "events_replay_address": f"ipc://{tmp_path}/replay"}
    feed = IndexFeed(PrefixIndex(10_000, monotonic), context=context)
    check = HitCheck(feed.check_digest)
    engine = RemoteEngine(f"ipc://{tmp_path}/e")
    engine.open()
    try:
        with engine_process(engine.address, config, "server.core_process", **addresses) as process:
            feed.open_target(TARGET, addresses["events_address"], addresses["events_replay_address"])
            await engine.wait_ready()
            await until(lambda: feed.is_synced(TARGET), "the feed has the engine's state")
            talks = Conversations(engine, feed, check)
            cached = []
            for _ in range(12):
                predicted, found = await talks.ask()
                assert predicted == found.total
                cached.append(found.total)
            assert max(cached) > 2 * BLOCK_SIZE

            await engine.reset_prefix_cache()
            await until(lambda: not feed.index.digest(TARGET), "a reset takes back all claims")
            assert await talks.ask() == (0, CachedTokens())

            process.signal(signal.SIGKILL)
            await process.restart()
            await until(lambda: not feed.index.digest(TARGET), "another process has nothing cached")
            await engine.wait_ready()
            for _ in range(4):
                predicted, found = await talks.ask()
                assert predicted == found.total
            assert check.counters["misses"] == 0
            assert feed.counters["digest_mismatches"] == 0
    finally:
        await feed.close()
        engine.close()
