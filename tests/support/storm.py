"""Clients that do all that clients do: they stay, leave at once, in the queue or in the middle, or send junk.

What a client sees is checked here (an answer is whole, a stream ends in exactly one way); what the server must have
left afterwards is the test's to check. Deterministic in what is sent, not in when.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field

from tests.support.api_server import event_data
from tests.support.raw_http import exchange, send

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STOP_STRINGS = ["a", "e", "i", "o", "\n"]
LONG_PROMPT_BYTES = (280, 440)
"""More than one step's tokens, less than the window of 512 with the longest answer."""

LONGEST_PATIENCE_S = 0.2
"""Of those who leave without having seen anything: some are in the queue then, some run, some have their answer."""

Json = dict[str, object]


@dataclass
class Tally:
    """What the clients saw. `choices` counts those that were asked for in requests that the server had to accept."""

    requests: int = 0
    choices: int = 0
    left: int = 0
    bad: int = 0
    refused: int = 0
    finished: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Storm:
    url: str
    model: str
    tally: Tally = field(default_factory=Tally)

    async def run(self, requests: int, *, concurrency: int, seed: int) -> None:
        """Send so many requests, some at the same time; return when every client is gone."""
        numbers = iter(range(requests))

        async def client() -> None:
            for number in numbers:
                await self._one(random.Random(f"{seed}/{number}"))

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())

    async def _one(self, rng: random.Random) -> None:
        self.tally.requests += 1
        kind = rng.choices(
            (self._stay, self._leave_stream, self._leave_whole, self._leave_body, self._send_junk),
            weights=(35, 30, 20, 5, 10),
        )[0]
        await kind(rng)

    async def _stay(self, rng: random.Random) -> None:
        path, body, choices = self._request(rng)
        self.tally.choices += choices
        status, text = await exchange(self.url, path, body)
        if status == 429:
            self.tally.refused += 1
            return
        assert status == 200, text
        if body["stream"]:
            self._check_stream(event_data(text), choices)
        else:
            reasons = [choice["finish_reason"] for choice in json.loads(text)["choices"]]
            assert len(reasons) == choices
            self.tally.finished.update(reasons)

    def _check_stream(self, events: list[str], choices: int) -> None:
        *chunks, last = events
        if last != "[DONE]":
            # A choice that found the queue full after another had begun.
            assert json.loads(last)["error"]["code"] == "server_is_overloaded", last
            self.tally.refused += 1
            return
        ends: Counter[int] = Counter()
        for chunk in map(json.loads, chunks):
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                assert not ends[choice["index"]], "text behind the end of a choice"
                if choice["finish_reason"] is not None:
                    ends[choice["index"]] += 1
                    self.tally.finished[choice["finish_reason"]] += 1
        assert ends == Counter(range(choices))

    async def _leave_stream(self, rng: random.Random) -> None:
        """Read some events of a stream, and go; with a reset or without."""
        path, body, choices = self._request(rng)
        self.tally.choices += choices
        self.tally.left += 1
        reader, writer = await send(self.url, path, {**body, "stream": True})
        try:
            for _ in range(rng.randrange(1, 40)):
                if not await _next_event(reader):
                    break
        finally:
            _leave(writer, rng)

    async def _leave_whole(self, rng: random.Random) -> None:
        """Ask for a whole answer and go without it."""
        path, body, choices = self._request(rng)
        self.tally.choices += choices
        self.tally.left += 1
        reader, writer = await send(self.url, path, {**body, "stream": False})
        try:
            if rng.random() < 0.8:
                await asyncio.wait_for(reader.read(1), rng.random() * LONGEST_PATIENCE_S)
        except TimeoutError:
            pass
        finally:
            # No reset here: it could overtake the request, which would then never have been sent.
            writer.close()

    async def _leave_body(self, rng: random.Random) -> None:
        """Announce a body and go before its end."""
        self.tally.left += 1
        _, writer = await send(self.url, rng.choice((CHAT, COMPLETIONS)), {"model": self.model}, missing_bytes=10)
        await writer.drain()
        writer.close()

    async def _send_junk(self, rng: random.Random) -> None:
        self.tally.bad += 1
        path, body, _ = self._request(rng)
        wrong: Json = rng.choice(
            [
                {"temperature": -1},
                {"max_tokens": -1},
                {"n": 0},
                {"stop": 7},
                {"messages": [], "prompt": []},
                {"messages": [{"role": "user", "content": "x" * 600}], "prompt": "x" * 600},
                {"prompt": [999_999], "messages": [{"role": "ghost", "content": "boo"}]},
                {"model": "another"},
            ]
        )
        status, text = await exchange(self.url, path, {**body, **wrong})
        assert status in (400, 404), text
        error = json.loads(text)["error"]
        assert error["param"] is not None
        assert error["type"] == "invalid_request_error"

    def _request(self, rng: random.Random) -> tuple[str, Json, int]:
        """Return a route, a good body for it and how many choices the answer has."""
        n = rng.choice((1, 1, 1, 2, 3))
        body: Json = {
            "model": self.model,
            "n": n,
            "max_tokens": rng.randrange(1, 60),
            "temperature": rng.choice((0, 1.0)),
            "ignore_eos": rng.random() < 0.5,
            "stream": rng.random() < 0.6,
        }
        if rng.random() < 0.3:
            body["stop"] = rng.sample(STOP_STRINGS, 2)
        if rng.random() < 0.2:
            body["seed"] = rng.randrange(1000)
        if rng.random() < 0.5:
            return CHAT, {**body, "messages": [{"role": "user", "content": _prompt(rng)}]}, n
        prompts = [_prompt(rng) for _ in range(rng.choice((1, 1, 1, 3)))]
        return COMPLETIONS, {**body, "prompt": prompts if len(prompts) > 1 else prompts[0]}, n * len(prompts)


def _prompt(rng: random.Random) -> str:
    """A text that has its beginning in common with others, as real prompts have. One byte is one token."""
    length = rng.randrange(*LONG_PROMPT_BYTES) if rng.random() < 0.2 else rng.randrange(1, 100)
    common = f"conversation {rng.randrange(8)}: " * 20
    return (common[: rng.randrange(200)] + "".join(rng.choices("abcdefgh ", k=length)))[-length:]


def _leave(writer: asyncio.StreamWriter, rng: random.Random) -> None:
    if rng.random() < 0.5:
        writer.close()
    else:
        writer.transport.abort()


async def _next_event(reader: asyncio.StreamReader) -> bool:
    """Read to the end of an event; False at the end of the answer."""
    try:
        await reader.readuntil(b"\n\n")
    except asyncio.IncompleteReadError:
        return False
    return True
