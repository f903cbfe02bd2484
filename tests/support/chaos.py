"""Clients that ask without a pause while engines die, fall silent or leave, and compare each answer with the first one.

`Crowd` is the clients, the functions below do the harm. A request that fails in any way ends the crowd with its error;
one that hangs is found by the test's limit.
"""

from __future__ import annotations

import asyncio
import random
import signal
import string
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import psutil

from tests.support.answers import CHAT, COMPLETIONS, Answer, Json, Question, ask, ask_streaming
from tests.support.headrace_server import HeadraceServer
from tests.support.until import until

LIMIT_S = 240.0
"""Only a hang takes so long. What takes longest is to wait until a lone engine has been started again."""


def mixed_questions(model: str, *, count: int, tokens: int, seed: int = 3) -> list[Question]:
    """Greedy and seeded, bound by grammars, with several choices, logprobs and stop strings; no two alike."""
    rng = random.Random(seed)
    kinds: Sequence[Json] = (
        {"temperature": 0, "ignore_eos": True},
        {"temperature": 0.9, "seed": 7},
        {"temperature": 0.8, "seed": 8, "guided_regex": "[a-h]{20,60}"},
        {"temperature": 0.7, "seed": 9, "n": 2, "ignore_eos": True},
        {"temperature": 1.0, "seed": 10, "logprobs": 2, "ignore_eos": True},
        {"temperature": 1.0, "seed": 11, "stop": ["e", "\x07"], "ignore_eos": True},
        {
            "temperature": 0,
            "guided_json": {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 9},
        },
        {"temperature": 1.0, "seed": 12, "top_p": 0.9, "top_k": 40, "presence_penalty": 0.5, "n": 3},
    )
    questions = []
    for number in range(count):
        text = "".join(rng.choices(string.ascii_lowercase, k=rng.randrange(5, 90)))
        body: Json = {"model": model, "max_tokens": tokens, **kinds[number % len(kinds)]}
        if (number // len(kinds)) % 2 and "logprobs" not in body:
            questions.append(Question(CHAT, {**body, "messages": [{"role": "user", "content": text}]}))
        else:
            questions.append(Question(COMPLETIONS, {**body, "prompt": text}))
    return questions


@dataclass
class Crowd:
    """`answered` counts by "streamed" and "whole"; `longest_s` is of one answer. `cut` are those whose connection was
    broken: where `may_break`, such a client asks anew, as it does after a 503."""

    client: httpx.AsyncClient
    questions: list[Question]
    expected: list[Answer]
    may_break: bool = False
    answered: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    longest_s: float = 0.0
    _leaving: bool = False

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[Crowd]:
        """Have every client ask again and again, and let each have its last answer in the end."""
        async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
            for number in range(len(self.questions)):
                group.create_task(self._client(number))
            yield self
            self._leaving = True
            limit.reschedule(asyncio.get_running_loop().time() + LIMIT_S)

    async def wait_answers(self, more: int) -> None:
        """Return when so many more answers have come."""
        wanted = self.answered.total() + more
        await until(lambda: self.answered.total() >= wanted, f"{more} more answers", limit_s=LIMIT_S)

    async def _client(self, number: int) -> None:
        turn = number
        while not self._leaving:
            begun_s = time.monotonic()
            try:
                answer = await self._ask(self.questions[number], streaming=bool(turn % 2))
            except httpx.TransportError:
                if not self.may_break:
                    raise
                self.cut += 1
                continue
            assert answer == self.expected[number], f"question {number}: {self.questions[number]}"
            self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
            self.answered["streamed" if turn % 2 else "whole"] += 1
            turn += 1

    async def _ask(self, question: Question, *, streaming: bool) -> Answer:
        return await (ask_streaming if streaming else ask)(self.client, question)


@asynccontextmanager
async def strict_client(server: HeadraceServer, *, allow_503: bool = False) -> AsyncIterator[httpx.AsyncClient]:
    """A client for which every status but 200 is a failure, and which waits as long as it takes."""

    async def check(response: httpx.Response) -> None:
        if response.status_code != 200 and not (allow_503 and response.status_code == 503):
            raise AssertionError(f"{response.status_code}: {(await response.aread()).decode()}")

    async with await server.client() as client:
        client.timeout = httpx.Timeout(None)
        client.event_hooks = {"response": [check]}
        yield client


async def first_answers(client: httpx.AsyncClient, questions: Sequence[Question]) -> list[Answer]:
    """Ask while nobody disturbs, few at a time."""
    gate = asyncio.Semaphore(8)

    async def one(question: Question) -> Answer:
        async with gate:
            return await ask(client, question)

    return list(await asyncio.gather(*(one(question) for question in questions)))


async def wait_serving(server: HeadraceServer, count: int) -> None:
    """Return when so many engines can be asked."""

    async def all_ready() -> bool:
        return list(target_gauges(await server.metrics(), "ready").values()) == [1.0] * count

    await until(all_ready, f"{count} engines can be asked", limit_s=LIMIT_S)


async def wait_replaced(server: HeadraceServer, gone: psutil.Process, count: int) -> None:
    """Return when another process has taken the place of one that is at its end, and all `count` can be asked."""
    await until(
        lambda: len(server.cores) == count and gone.pid not in {core.pid for core in server.cores},
        "another engine is in its place",
        limit_s=LIMIT_S,
    )
    await wait_serving(server, count)


async def wait_nothing_left(server: HeadraceServer, count: int) -> None:
    """Return when no engine has a request or a block in use, and no process that routes has a request in flight."""
    await wait_serving(server, count)

    async def is_clear() -> bool:
        load = await server.load()
        in_flight = target_gauges(await server.metrics(), "in_flight")
        return not (load.running or load.waiting or load.kv_blocks_used or sum(in_flight.values()))

    await until(is_clear, "nothing is in flight or in use", limit_s=LIMIT_S)


def target_gauges(metrics: dict[str, float], name: str) -> dict[str, float]:
    """Return one metric of the targets, by its labels."""
    return {label: value for label, value in metrics.items() if label.startswith(f"headrace_target_{name}{{")}


async def kill_one(server: HeadraceServer, rng: random.Random) -> psutil.Process:
    """SIGKILL one of the engines that are there now; wait until there is one."""
    await until(lambda: bool(server.cores), "an engine is there", limit_s=LIMIT_S)
    core = rng.choice(server.cores)
    send(core, signal.SIGKILL)
    return core


def send(process: psutil.Process, signum: int) -> None:
    try:
        process.send_signal(signum)
    except psutil.NoSuchProcess:
        return


async def every(period_s: float, duration_s: float, harm: Callable[[], Awaitable[object]]) -> int:
    """Do harm again and again for a while; return how often."""
    end_s = time.monotonic() + duration_s
    times = 0
    while time.monotonic() < end_s:
        await asyncio.sleep(period_s)
        await harm()
        times += 1
    return times
