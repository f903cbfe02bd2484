"""numerics=invariant over HTTP: a request's tokens and logprobs are the same to the last digit, whatever happens to it.

One server for all tests of a dtype: what one test leaves there (cached prefixes, new processes) may not matter to the
next, and that is the subject.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.support.answers import CHAT, COMPLETIONS, Answer, Question, ask, ask_streaming
from tests.support.headrace_server import HeadraceServer, headrace
from tests.support.until import until

DTYPES = ("float32", "bfloat16")


@dataclass
class Served:
    """A server, the questions put to it, and what it answered when it was new and each question was alone."""

    server: HeadraceServer
    questions: list[Question]
    alone: list[Answer] = field(default_factory=list)

    async def first_answers(self, client: httpx.AsyncClient) -> list[Answer]:
        if not self.alone:
            answers = [await ask(client, question) for question in self.questions]
            assert [answer.cached_tokens for answer in answers] == [0] * len(answers)
            for answer in answers:
                assert all(choice.logprobs and choice.finish_reason for choice in answer.choices)
            self.alone = answers
        return self.alone


def tiny_questions(model: str) -> list[Question]:
    """Greedy and seeded, short prompts and prompts of several steps, one choice and more, texts and ids."""
    rng = random.Random(5)

    def text(length: int) -> str:
        return "".join(rng.choices("abcdefghijklmnop ", k=length))

    def chat(length: int, **fields: object) -> Question:
        messages = [{"role": "user", "content": text(length)}]
        body = {"model": model, "messages": messages, "logprobs": True, "top_logprobs": 3}
        return Question(CHAT, {**body, **fields})

    def complete(prompt: object, **fields: object) -> Question:
        return Question(COMPLETIONS, {"model": model, "prompt": prompt, "logprobs": 2, **fields})

    return [
        chat(30, temperature=0, max_tokens=40, ignore_eos=True),
        chat(170, temperature=0.9, seed=7, max_tokens=30, n=2),
        complete(text(90), temperature=1.0, top_p=0.9, top_k=50, seed=11, max_tokens=40),
        complete([text(20), text(75)], temperature=0, max_tokens=25, ignore_eos=True),
        complete([rng.randrange(4, 260) for _ in range(60)], temperature=0.7, seed=3, max_tokens=30, stop=["\x01"]),
    ]


@pytest.fixture(scope="module", params=DTYPES)
def tiny(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    flags = {"numerics": "invariant", "dtype": request.param, "threads": 1, "api_processes": 2}
    limits = {"block_size": 16, "max_step_tokens": 64, "max_running": 16, "kv_cache_memory": "2MiB"}
    with headrace(tmp_path_factory.mktemp("invariant"), tiny_model, **flags, **limits) as server:
        yield Served(server, tiny_questions(str(tiny_model)))


@pytest.fixture
async def client(tiny: Served) -> AsyncIterator[httpx.AsyncClient]:
    await tiny.server.wait_ready()
    async with await tiny.server.client() as client:
        await tiny.first_answers(client)
        yield client


async def test_with_the_prefix_cached(tiny: Served, client: httpx.AsyncClient) -> None:
    again = [await ask(client, question) for question in tiny.questions]
    assert again == tiny.alone
    assert min(answer.cached_tokens for answer in again) > 0


async def test_streamed(tiny: Served, client: httpx.AsyncClient) -> None:
    assert [await ask_streaming(client, question) for question in tiny.questions] == tiny.alone


async def test_among_random_neighbours(tiny: Served, client: httpx.AsyncClient) -> None:
    rng = random.Random(2)
    going_on = True

    async def neighbour() -> None:
        while going_on:
            prompt = [rng.randrange(4, 260) for _ in range(rng.randrange(1, 200))]
            body = {"model": tiny.server.model, "prompt": prompt, "max_tokens": rng.randrange(1, 50)}
            assert (await client.post(COMPLETIONS, json=body)).status_code == 200

    neighbours = [asyncio.create_task(neighbour()) for _ in range(12)]
    for _ in range(2):
        asked = (ask(client, question) for question in tiny.questions)
        streamed = (ask_streaming(client, question) for question in tiny.questions)
        answers = await asyncio.gather(*asked, *streamed)
        assert answers == [*tiny.alone, *tiny.alone]
    going_on = False
    await asyncio.gather(*neighbours)


async def test_after_the_api_processes_were_killed(tiny: Served, client: httpx.AsyncClient) -> None:
    server = tiny.server
    old = server.apis
    for process in old:
        process.kill()
    await until(lambda: len({p.pid for p in server.apis} - {p.pid for p in old}) == 2, "both were started again")
    await server.wait_ready()
    async with await server.client() as fresh:
        assert [await ask(fresh, question) for question in tiny.questions] == tiny.alone
    assert (await server.wait_idle()).kv_blocks_used == 0


async def test_while_the_engine_is_killed(tiny: Served, client: httpx.AsyncClient) -> None:
    """Streams go on behind the tokens that they have, and whole answers come as if nothing had been."""
    server, core = tiny.server, tiny.server.core
    killed = asyncio.Event()

    async def kill_when_under_way(event: int) -> None:
        if event == 12 and not killed.is_set():
            killed.set()
            core.kill()
            # Here, so that the stream's reader is held until the tokens behind the kill come from another process.
            await until(lambda: not core.is_running(), "the engine is gone")

    streamed = (ask_streaming(client, question, kill_when_under_way) for question in tiny.questions)
    asked = (ask(client, question) for question in tiny.questions)
    answers = await asyncio.gather(*streamed, *asked)
    assert killed.is_set()
    assert answers == [*tiny.alone, *tiny.alone]
    load = await server.wait_idle()
    assert sum(load.requests_total.values()) > 0, "none was left for the new engine"
    assert load.kv_blocks_used == 0


@pytest.mark.parametrize(
    ("dtype", "kill"),
    [
        ("bfloat16", False),
        pytest.param("bfloat16", True, marks=pytest.mark.soak),
        pytest.param("float32", True, marks=pytest.mark.soak),
    ],
)
async def test_a_model_of_some_size(tmp_path: Path, dtype: str, kill: bool) -> None:
    """The same with SmolLM2, in one go: cached, streamed, side by side, and with its engine killed."""
    flags = {"numerics": "invariant", "dtype": dtype, "threads": 1, "max_model_len": 256, "kv_cache_memory": "32MiB"}
    messages = [{"role": "user", "content": "Name three colours."}]
    body = {"model": "smollm2", "messages": messages, "logprobs": True, "top_logprobs": 2, "max_tokens": 8}
    questions = [
        Question(CHAT, {**body, "temperature": 0}),
        Question(COMPLETIONS, {"model": "smollm2", "prompt": "Once", "logprobs": 1, "seed": 4, "max_tokens": 8}),
    ]
    with headrace(tmp_path, "smollm2", **flags) as server:
        await server.wait_ready()
        served = Served(server, questions)
        async with await server.client() as client:
            alone = await served.first_answers(client)
            asked = (ask(client, question) for question in questions)
            streamed = (ask_streaming(client, question) for question in questions)
            assert await asyncio.gather(*asked, *streamed) == [*alone, *alone]
            if kill:

                async def kill_core(event: int) -> None:
                    if event == 4:
                        server.core.kill()

                assert await ask_streaming(client, questions[0], kill_core) == alone[0]
                assert "ended with signal SIGKILL" in server.text
