"""What the supervisor asks of the next attempt."""

from __future__ import annotations

import asyncio

from engine.protocol import CachedTokens, GenerateRequest, SamplingParams, TokenLogprobs, TokenOutput
from router.attempts import Limits, Run


async def test_prompt_logprobs_are_asked_for_until_they_have_come() -> None:
    request = GenerateRequest(
        request_id="r", prompt_ids=[1, 2], sampling=SamplingParams(logit_bias={3: 1.0}), prompt_logprobs=1
    )
    run = Run(request, Limits(), asyncio.Lock())
    assert run.next_attempt().prompt_logprobs == 1
    second = run.next_attempt()
    assert second.prompt_logprobs == 1, "the first attempt had no output"
    entries = [None, TokenLogprobs(-1.0, [2], [-1.0])]
    assert run.accept(TokenOutput("r", second.attempt, 0, [7], prompt_logprobs=entries)) is not None
    third = run.next_attempt()
    assert third.prompt_logprobs is None
    assert third.resume_ids == [7]
    assert third.sampling == second.sampling


async def test_what_was_cached_is_told_by_the_attempt_that_began() -> None:
    run = Run(GenerateRequest(request_id="r", prompt_ids=[1, 2]), Limits(), asyncio.Lock())
    first = run.next_attempt()
    assert run.accept(TokenOutput("r", first.attempt, 0, [7])) is not None
    late = run.accept(TokenOutput("r", first.attempt, 1, [8], cached=CachedTokens(device=1)))
    assert late is not None
    assert late.cached == CachedTokens(device=1), "some engines tell it behind the tokens"
    second = run.next_attempt()
    resumed = run.accept(TokenOutput("r", second.attempt, 2, [9], cached=CachedTokens(device=4)))
    assert resumed is not None
    assert resumed.cached is None, "of a resumed attempt the client's own tokens are cached"
