"""Structured outputs with a real model: do they end, do they validate, and what do they cost.

    python -m benchmarks.grammar [--schemas 300] [--pairs 60] [--model smollm2]

1. Generated schemas (tests/support/random_schemas.py), each once, at temperature 1, `--running` at a time: every output
   that ends by itself must validate, and at least 90 % must.
2. The same outputs again, token by token: what a mask costs, and what the sampler pays to apply one.
3. A server: time to the first token of requests with a schema that it has never seen, and without any, in turn.

Prints a JSON object and ends with 1 when a bar is missed. Needs the test extra.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
import jsonschema
import numpy as np
import torch

from engine import LLM, Grammar, SamplingParams
from engine.completion import Completion
from engine.grammar.base import Vocabulary
from engine.grammar.pool import GrammarPool
from engine.sampler.masks import TokenMasks
from tests.support.headrace_server import headrace
from tests.support.random_schemas import Schema, random_schema

MESSAGES = [{"role": "user", "content": "Give me a JSON object."}]
MIN_FINISHED = 0.9
MAX_MASK_US = 100
MAX_TTFT_MS = 50


def main() -> None:
    options = _options()
    rng = random.Random(options.seed)
    figures: dict[str, float] = {}
    bars: dict[str, bool] = {}
    if options.schemas:
        _conformance([random_schema(rng) for _ in range(options.schemas)], options, figures, bars)
    if options.pairs:
        schemas = [random_schema(rng) for _ in range(options.pairs)]
        figures |= asyncio.run(_ttft(options.model, schemas))
        bars[f"a new schema adds under {MAX_TTFT_MS} ms to the first token"] = figures["ttft_added_ms"] < MAX_TTFT_MS
    rounded = {name: round(value, 2) for name, value in figures.items()}
    print(json.dumps({"figures": rounded, "bars": bars}, indent=1))
    sys.exit(not all(bars.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schemas", type=int, default=300, help="0 leaves parts 1 and 2 out")
    parser.add_argument("--pairs", type=int, default=60, help="0 leaves part 3 out")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--running", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=384)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def _conformance(
    schemas: Sequence[Schema], options: argparse.Namespace, figures: dict[str, float], bars: dict[str, bool]
) -> None:
    grammars = [Grammar.of_schema(schema) for schema in schemas]
    samplings = [
        SamplingParams(temperature=1.0, seed=index, max_tokens=options.max_tokens) for index in range(len(schemas))
    ]
    with LLM(options.model, max_model_len=1024, max_running=options.running) as llm:
        started_s = time.perf_counter()
        outputs = llm.chat([MESSAGES] * len(schemas), samplings, grammar=grammars)
        seconds = time.perf_counter() - started_s
        vocabulary = Vocabulary.of(llm.codec, llm.info.vocab_size, llm.info.eos_ids)
    reasons = Counter(output.finish_reason for output in outputs)
    invalid = [output.text for output, schema in zip(outputs, schemas, strict=True) if _is_wrong(output, schema)]
    tokens = sum(output.usage.completion_tokens for output in outputs)
    figures |= {"schemas": len(schemas), "finished": reasons["stop"], "invalid": len(invalid)}
    figures |= {"output_tokens": tokens, "tokens_per_s": tokens / seconds}
    for text in invalid:
        print("invalid:", text, file=sys.stderr)
    for output, schema in zip(outputs, schemas, strict=True):
        if output.finish_reason != "stop":
            print(output.finish_reason, output.error, json.dumps(schema), output.text[-120:], file=sys.stderr)
    figures |= _mask_costs(vocabulary, grammars, outputs) | _apply_costs(len(vocabulary.tokens), options.running)
    bars["every finished output validates"] = not invalid
    bars[f"{MIN_FINISHED:.0%} finish"] = reasons["stop"] >= MIN_FINISHED * len(schemas)
    bars[f"a mask costs under {MAX_MASK_US} us"] = figures["mask_us"] + figures["apply_us"] < MAX_MASK_US


def _formats() -> jsonschema.FormatChecker:
    """Return the validator's own checks, but for the year 0000: RFC 3339 has it, Python's calendar does not."""
    own = jsonschema.Draft202012Validator.FORMAT_CHECKER
    checker = jsonschema.FormatChecker(formats=list(own.checkers))
    for name in ("date", "date-time"):
        if name in own.checkers:
            # 2000 is a leap year as 0000 is.
            checker.checks(name)(
                lambda value, name=name: own.conforms(
                    f"2000{value[4:]}" if isinstance(value, str) and value.startswith("0000-") else value, name
                )
            )
    return checker


FORMATS = _formats()


def _is_wrong(output: Completion, schema: Schema) -> bool:
    if output.finish_reason != "stop":
        return False
    try:
        jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(output.text))
    except (ValueError, jsonschema.ValidationError):
        return True
    return False


def _mask_costs(vocabulary: Vocabulary, grammars: Sequence[Grammar], outputs: Sequence[Completion]) -> dict[str, float]:
    """Each token's mask and the step to the next, microseconds, in one thread."""
    pool = GrammarPool(lambda: vocabulary)
    compile_ms, masks_us = [], []
    try:
        started_s = time.perf_counter()
        pool.submit(Grammar("regex", "a")).result()
        first_ms = 1e3 * (time.perf_counter() - started_s)
        for grammar, output in zip(grammars, outputs, strict=True):
            started_s = time.perf_counter()
            matcher = pool.submit(grammar).result().start(())
            compile_ms.append(1e3 * (time.perf_counter() - started_s))
            for token_id in output.token_ids:
                started_s = time.perf_counter()
                matcher.mask()
                if token_id not in vocabulary.eos_ids:
                    matcher.advance(token_id)
                masks_us.append(1e6 * (time.perf_counter() - started_s))
    finally:
        pool.close()
    masks_us.sort()
    return {
        "first_grammar_ms": first_ms,
        "compile_ms": statistics.median(compile_ms),
        "mask_us": statistics.median(masks_us),
        "mask_mean_us": statistics.fmean(masks_us),
        "mask_p99_us": masks_us[int(0.99 * len(masks_us))],
    }


def _apply_costs(vocab_size: int, rows: int, repeats: int = 100) -> dict[str, float]:
    """What the sampler pays per row on the CPU to apply a mask, microseconds."""
    masks = TokenMasks(vocab_size, torch.device("cpu"))
    logits = torch.randn(rows, vocab_size)
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (rows, -(-vocab_size // 32)), dtype=np.int32)
    there = torch.arange(rows), torch.from_numpy(words)
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        masks.apply(logits, *there)
        times.append(1e6 * (time.perf_counter() - started_s) / rows)
    return {"apply_us": statistics.median(times)}


async def _ttft(model: str, schemas: Sequence[Schema]) -> dict[str, float]:
    """Time to the first token over HTTP, with a new schema and without, in turn, one request at a time."""
    with tempfile.TemporaryDirectory(prefix="hr-") as directory, headrace(Path(directory), model) as server:
        await server.wait_ready()
        async with await server.client() as client:
            body = {"model": server.model, "messages": MESSAGES, "stream": True, "max_tokens": 4}
            first_ms = await _first_token_ms(client, body | {"response_format": {"type": "json_object"}})
            plain, constrained = [], []
            for schema in schemas:
                wanted = {"type": "json_schema", "json_schema": {"name": "new", "schema": schema}}
                plain.append(await _first_token_ms(client, body))
                constrained.append(await _first_token_ms(client, body | {"response_format": wanted}))
    return {
        "pairs": len(schemas),
        "ttft_first_grammar_ms": first_ms,
        "ttft_ms": statistics.median(plain),
        "ttft_new_schema_ms": statistics.median(constrained),
        "ttft_added_ms": statistics.median(constrained) - statistics.median(plain),
    }


async def _first_token_ms(client: httpx.AsyncClient, body: dict[str, object]) -> float:
    started_s = time.perf_counter()
    first_s = None
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if first_s is None and '"content":"' in line and '"content":""' not in line:
                first_s = time.perf_counter()
    if first_s is None:
        raise SystemExit(f"no token came: {response.status_code}")
    return 1e3 * (first_s - started_s)


if __name__ == "__main__":
    main()
