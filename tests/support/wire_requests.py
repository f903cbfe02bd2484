"""Requests to an engine behind the wire, and their answers in one piece."""

from __future__ import annotations

from typing import Any

from engine.protocol import GenerateRequest, SamplingParams, TokenOutput
from engine.wire.client import RemoteEngine
from engine.wire.merge import merge_outputs


def request(request_id: str = "r", seed: int = 1, count: int = 20, **fields: Any) -> GenerateRequest:  # noqa: ANN401
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=fields.pop("prompt_ids", [1, 2]),
        sampling=SamplingParams(seed=seed, max_tokens=count, logprobs=fields.pop("logprobs", None)),
        **fields,
    )


async def collect(engine: RemoteEngine, wanted: GenerateRequest) -> TokenOutput:
    return merge_outputs([output async for output in engine.generate(wanted)])
