"""An engine that is killed under load, wherever it is in what it writes: no answer is wrong, nothing half written
stays, and what was stored is found again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.chaos import Crowd, first_answers, kill_one, mixed_questions, strict_client, wait_replaced
from tests.support.headrace_server import HeadraceServer, headrace
from tests.support.until import until

TINY = {"dtype": "float32", "block_size": 16, "kv_cache_memory": "1MiB", "numerics": "invariant", "threads": 1}
QUESTIONS = 24


def store_flags(directory: Path) -> dict[str, object]:
    disk = f"disk={directory / 'kv'},256MiB,min-free=1MiB"
    return {**TINY, "kv_store": ["ram=16MiB", disk], "kv_store_load": "always", "stall_timeout": "1s"}


async def kill_again_and_again(model: Path, directory: Path, kills: int) -> Crowd:
    """Compare every answer with those of a server without a store; return what the clients saw."""
    rng = random.Random(kills)
    questions = mixed_questions(str(model), count=QUESTIONS, tokens=12)
    with headrace(directory, model, **TINY) as server:
        await server.wait_ready()
        async with strict_client(server) as client:
            expected = await first_answers(client, questions)
    with headrace(directory, model, **store_flags(directory)) as server:
        await server.wait_ready()
        async with strict_client(server, allow_503=True) as client:
            crowd = Crowd(client, questions, expected, may_break=True)
            async with crowd.asking():
                for _ in range(kills):
                    await crowd.wait_answers(rng.randrange(1, QUESTIONS))
                    await wait_replaced(server, await kill_one(server, rng), 1)
                await crowd.wait_answers(QUESTIONS)
            await check_all_found(server, directory, crowd)
    return crowd


async def check_all_found(server: HeadraceServer, directory: Path, crowd: Crowd) -> None:
    """After one more death all that was asked is found on disk, up to one block in a hundred."""
    await first_answers(crowd.client, crowd.questions)
    before = await cached_tokens(server)
    await first_answers(crowd.client, crowd.questions)
    warm = await cached_tokens(server) - before
    await wait_replaced(server, await kill_one(server, random.Random(0)), 1)
    await until(lambda: not list((directory / "kv" / "incoming").iterdir()), "unfinished files are deleted")
    before = await cached_tokens(server)
    assert await first_answers(crowd.client, crowd.questions) == crowd.expected
    assert await cached_tokens(server) - before >= 0.99 * warm > 0


async def cached_tokens(server: HeadraceServer) -> int:
    return (await server.load()).cached_tokens_total


@pytest.mark.soak
@pytest.mark.parametrize("kills", [5, 100])
async def test_an_engine_that_is_killed_under_load(kills: int, tiny_model: Path, tmp_path: Path) -> None:
    await kill_again_and_again(tiny_model, tmp_path, kills)
