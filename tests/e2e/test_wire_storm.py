"""A storm on the real engine process over its wire: every accepted request gets exactly one terminal output."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import DeadlineError, RequestError
from engine.protocol import EngineLoad, GenerateRequest, SamplingParams
from engine.wire.client import RemoteEngine
from router.supervisor import Supervisor
from tests.support.scripted_engine import engine_process
from tests.support.static_pool import StaticPool, StaticTarget
from tests.support.until import until

PEERS = 3


@dataclass
class Peer:
    """One client of the engine, as an API process is one."""

    engine: RemoteEngine
    pool: StaticPool
    supervisor: Supervisor


@dataclass
class Books:
    """How the requests ended, as their clients saw it. `refused` ones were wrong and never accepted."""

    refused: int = 0
    ends: Counter[str] = field(default_factory=Counter)


@asynccontextmanager
async def running(path: Path, model: Path) -> AsyncIterator[list[Peer]]:
    config = EngineConfig(
        model=str(model),
        kv_cache_memory_bytes=768 << 10,
        max_running=32,
        max_step_tokens=128,
        threads=1,
    )
    address = f"ipc://{path}/e"
    peers = []
    with engine_process(address, config, "server.core_process"):
        try:
            for _ in range(PEERS):
                engine = RemoteEngine(address)
                engine.open()
                pool = StaticPool([StaticTarget("core", engine)])
                peers.append(Peer(engine, pool, Supervisor(pool)))
            for peer in peers:
                await peer.engine.wait_ready()
            yield peers
        finally:
            for peer in peers:
                peer.engine.close()


def random_request(number: int, rng: random.Random) -> GenerateRequest:
    length = rng.randrange(200, 400) if rng.random() < 0.2 else rng.randrange(1, 90)
    common = [10 + rng.randrange(8)] * rng.randrange(150)
    is_wrong = rng.random() < 0.05
    sampling = SamplingParams(
        temperature=-1.0 if is_wrong else rng.choice((0.0, 1.0)),
        max_tokens=rng.randrange(1, 60),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice((None, None, 2)),
    )
    return GenerateRequest(
        request_id=f"r{number}",
        group_id=rng.choice((None, f"g{number // 3}")),
        prompt_ids=[*common, *(rng.randrange(4, 260) for _ in range(length))][:440],
        sampling=sampling,
        # Not on a wrong request: it could end before its refusal comes, and then nobody would count that.
        deadline_unix_s=time.time() + rng.random() if rng.random() < 0.1 and not is_wrong else None,
        priority=rng.choice((0, 0, 0, 1)),
    )


async def one_client(peer: Peer, number: int, rng: random.Random, books: Books) -> None:
    """Run one request; end it after a random number of tokens in one of the ways there are, or let it end."""
    request = random_request(number, rng)
    patience = rng.choice((rng.randrange(1, 40), 1000))
    farewell = rng.choice(("close", "abort", "finish", "cancel"))
    next_offset, ends = 0, 0
    try:
        async with aclosing(peer.supervisor.generate(request)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                assert ends == 0, "an output after the terminal one"
                assert output.offset == next_offset
                next_offset += len(output.token_ids)
                if output.finish_reason is not None:
                    ends += 1
                    books.ends[output.finish_reason] += 1
                elif next_offset >= patience:
                    patience = 10_000
                    match farewell:
                        case "abort":
                            await peer.supervisor.abort(request.request_id)
                        case "finish":
                            await peer.supervisor.finish(request.request_id, next_offset)
                        case "cancel":
                            raise asyncio.CancelledError
                        case _:
                            books.ends["closed"] += 1
                            return
    except asyncio.CancelledError:
        books.ends["cancelled"] += 1
        return
    except RequestError:
        assert next_offset == 0
        books.refused += 1
        return
    except DeadlineError:
        books.ends["deadline"] += 1
        return
    assert ends == 1, "a stream without an end"


async def storm(peers: list[Peer], requests: int, concurrency: int, seed: int) -> Books:
    books = Books()
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            rng = random.Random(f"{seed}/{number}")
            await one_client(peers[number % PEERS], number, rng, books)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return books


async def quiet_load(peers: list[Peer]) -> EngineLoad:
    for peer in peers:
        await until(lambda peer=peer: peer.engine.num_running == 0, "the engine has ended every request")  # type: ignore[misc]
        assert peer.supervisor.num_running == 0
        assert set(peer.pool.in_flight.values()) == {0}
    return await peers[0].engine.load()


def assert_booked_once(peers: list[Peer], books: Books, load: EngineLoad) -> None:
    """The engine has ended what it accepted, each request once: a second end would have come late to its peer."""
    attempts = sum(peer.supervisor.counters["attempts"] for peer in peers)
    assert sum(load.requests_total.values()) == attempts - books.refused
    for peer in peers:
        assert peer.engine.counters == {"malformed_frames": 0, "late_outputs": 0, "lost_connections": 0, "given_up": 0}
    assert load.requests_total.get("error", 0) == 0
    assert (load.running, load.waiting, load.waiting_kv, load.kv_blocks_used) == (0, 0, 0, 0)


async def test_each_of_400_requests_ends_once(tiny_model: Path, tmp_path: Path) -> None:
    async with running(tmp_path, tiny_model) as peers:
        books = await storm(peers, 400, 64, seed=1)
        load = await quiet_load(peers)
        assert_booked_once(peers, books, load)
        assert sum(books.ends.values()) + books.refused == 400
        assert load.preemptions_total > 0
        assert set(books.ends) == {"stop", "length", "abort", "closed", "cancelled", "deadline"}


@pytest.mark.soak
async def test_each_of_10000_requests_ends_once(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path, tiny_model) as peers:
        books = await storm(peers, 10_000, 192, seed=2)
        load = await quiet_load(peers)
        assert_booked_once(peers, books, load)
        with capsys.disabled():
            print(f"\n{books}\n{load}")


async def test_a_peer_that_vanishes_takes_its_requests_with_it(tiny_model: Path, tmp_path: Path) -> None:
    async with running(tmp_path, tiny_model) as peers:
        stays, goes, _ = peers
        sampling = SamplingParams(max_tokens=400, ignore_eos=True)
        streams = [
            peer.engine.generate(GenerateRequest(request_id=f"r{number}", prompt_ids=[5, 6], sampling=sampling))
            for peer in (stays, goes)
            for number in range(10)
        ]
        await asyncio.gather(*(anext(stream) for stream in streams))
        goes.engine.close()
        ends = [[output.finish_reason async for output in stream][-1] for stream in streams[:10]]
        assert ends == ["length"] * 10

        async def is_idle() -> bool:
            load = await stays.engine.load()
            return load.running + load.waiting == 0

        await until(is_idle, "the lost peer's requests are gone")
        load = await stays.engine.load()
        assert load.requests_total == {"length": 10, "abort": 10}
        assert load.kv_blocks_used == 0
