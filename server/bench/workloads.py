"""What `headrace bench engine` asks for: lists of token-id requests. Knows no engine."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from engine.protocol import GenerateRequest, SamplingParams

SHARED_SEQUENCES = 256
SHARED_VOCAB = 10_000


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that are sent at once. `kind` says which figure counts."""

    name: str
    kind: str
    requests: tuple[GenerateRequest, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.sampling.max_tokens or 0 for request in self.requests)


def _requests(
    name: str, prompts: Sequence[list[int]], outputs: Sequence[int], temperature: float
) -> tuple[GenerateRequest, ...]:
    return tuple(
        GenerateRequest(
            request_id=f"{name}-{index}",
            prompt_ids=prompt,
            sampling=SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, seed=index),
        )
        for index, (prompt, count) in enumerate(zip(prompts, outputs, strict=True))
    )


def _prompts(rng: random.Random, lengths: Sequence[int], vocab: int) -> list[list[int]]:
    return [rng.choices(range(vocab), k=length) for length in lengths]


def decode(rng: random.Random, vocab: int, batch: int, context: int, outputs: int) -> Workload:
    name = f"decode {batch} x {context}"
    prompts = _prompts(rng, [context] * batch, vocab)
    return Workload(name=name, kind="decode", requests=_requests(name, prompts, [outputs] * batch, 0.0))


def prefill(rng: random.Random, vocab: int, count: int, length: int) -> Workload:
    """One output token each, so that the end is the end of the prompts."""
    name = f"prefill {count} x {length}"
    prompts = _prompts(rng, [length] * count, vocab)
    return Workload(name=name, kind="prefill", requests=_requests(name, prompts, [1] * count, 0.0))


def shared(temperature: float, vocab: int, shift: int = 0, scale: float = 1.0) -> Workload:
    """The bench that small engines share: 256 sequences, prompts and outputs of 100 to 1024 tokens, seed 0. `shift`
    moves every token id, and `scale` shortens all of it for a trial."""
    rng = random.Random(0)
    most = max(2, int(1024 * scale))
    least = max(1, int(100 * scale))
    count = max(1, int(SHARED_SEQUENCES * scale))
    prompts = [
        [(rng.randint(0, SHARED_VOCAB) + shift) % vocab for _ in range(rng.randint(least, most))] for _ in range(count)
    ]
    outputs = [rng.randint(least, most) for _ in range(count)]
    name = f"shared T={temperature:g}"
    return Workload(name=name, kind="shared", requests=_requests(name, prompts, outputs, temperature))


def again(workload: Workload, run: int) -> Workload:
    """The same under new ids: an engine may still know the old ones."""
    requests = tuple(
        msgspec.structs.replace(request, request_id=f"{request.request_id}#{run}") for request in workload.requests
    )
    return msgspec.structs.replace(workload, requests=requests)
