"""Answers of a server as they are compared: text, finish reason and logprobs of each choice, numbers as they were sent.

JSON numbers stay text, so equal means equal to the last digit, whatever a parser would make of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import httpx

from tests.support.api_server import event_data

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

Json = dict[str, object]
OnEvent = Callable[[int], Awaitable[None]]


@dataclass(frozen=True)
class Question:
    path: str
    body: Json


@dataclass
class Choice:
    """One choice. `logprobs` has one entry per token."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[object] = field(default_factory=list)


@dataclass
class Answer:
    """`cached_tokens` is not compared: it may differ where nothing else may. The other counts of the usage are as they
    were sent."""

    choices: list[Choice]
    prompt_tokens: str
    completion_tokens: str
    cached_tokens: int = field(default=0, compare=False)


async def ask(client: httpx.AsyncClient, question: Question) -> Answer:
    """Return the answer of a request that is not streamed."""
    while (response := await client.post(question.path, json=question.body)).status_code == 503:
        # One API process of several that has only just started: clients come again, as they are told to.
        assert "retry-after" in response.headers
        await asyncio.sleep(0.05)
    assert response.status_code == 200, response.text
    whole = _parse(response.text)
    choices = [Choice() for _ in whole["choices"]]
    for part in whole["choices"]:
        _add(choices[int(part["index"])], part)
    return _answer(choices, whole["usage"])


async def ask_streaming(client: httpx.AsyncClient, question: Question, on_event: OnEvent | None = None) -> Answer:
    """Return the answer put together from a stream; `on_event` is awaited with the number of each event."""
    body = {**question.body, "stream": True, "stream_options": {"include_usage": True}}
    choices: dict[int, Choice] = {}
    lines: list[str] = []
    async with client.stream("POST", question.path, json=body) as response:
        if response.status_code == 503:
            await asyncio.sleep(0.05)
            return await ask_streaming(client, question, on_event)
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            lines.append(line)
            if line.startswith("data: ") and on_event is not None:
                await on_event(sum(one.startswith("data: ") for one in lines))
    *chunks, usage, done = event_data("\n".join(lines))
    assert done == "[DONE]", done
    for chunk in map(_parse, chunks):
        for part in chunk["choices"]:
            choice = choices.setdefault(int(part["index"]), Choice())
            assert choice.finish_reason is None, "something came after the end of a choice"
            _add(choice, part)
    return _answer([choices[index] for index in sorted(choices)], _parse(usage)["usage"])


def _answer(choices: list[Choice], usage: dict) -> Answer:  # type: ignore[type-arg]
    cached = int(usage["prompt_tokens_details"]["cached_tokens"])
    return Answer(choices, usage["prompt_tokens"], usage["completion_tokens"], cached)


def _parse(text: str) -> dict:  # type: ignore[type-arg]
    parsed = json.loads(text, parse_float=str, parse_int=str)
    assert "error" not in parsed, text
    return parsed  # type: ignore[no-any-return]


def _add(choice: Choice, part: dict) -> None:  # type: ignore[type-arg]
    message = part.get("message") or part.get("delta") or {}
    choice.text += message.get("content") or part.get("text") or ""
    choice.finish_reason = part["finish_reason"]
    logprobs = part.get("logprobs")
    if logprobs is None:
        return
    if "content" in logprobs:
        choice.logprobs += logprobs["content"]
    else:
        names: Sequence[str] = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        choice.logprobs += zip(*(logprobs[name] for name in names), strict=True)
