"""What grammars cost: compiling a schema, a mask, a mask in the sampler; and whether a real model's outputs validate.

    python -m benchmarks.grammar [--schemas 30] [--model smollm2]

Needs the test extra (jsonschema). Prints a JSON object; times are medians unless their names say otherwise.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence

import jsonschema
import numpy as np
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.grammar.assets import pool_for
from engine.grammar.pool import GrammarPool
from engine.protocol import GenerateRequest, Grammar, SamplingParams
from engine.runner.build import build_engine
from engine.sampler.masks import TokenMasks
from engine.text.tokenizer import TextCodec
from tests.support.random_schemas import Schema, random_schema

PROMPT = "<|im_start|>user\nGive me a JSON object.<|im_end|>\n<|im_start|>assistant\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schemas", type=int, default=30)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=200)
    arguments = parser.parse_args()
    rng = random.Random(7)
    schemas = [random_schema(rng) for _ in range(arguments.schemas)]
    config = EngineConfig(model=arguments.model, max_model_len=1024, max_running=8)
    info, runner, num_blocks, assets = build_engine(config, lambda fraction, phase: None)
    codec = TextCodec.from_assets(info.text, assets, vocab_size=info.vocab_size)
    pool = pool_for(info, assets)
    started_s = time.perf_counter()
    pool.submit(Grammar("regex", "a")).result()
    figures: dict[str, object] = {"vocabulary": info.vocab_size, "first_grammar_ms": _ms_since(started_s)}
    figures["compile_ms"] = statistics.median(_compile_times_ms(pool, schemas))
    core = EngineCore(info, config, runner, num_blocks, grammars=pool)
    texts = _outputs(core, codec, schemas, arguments.max_tokens)
    finished = [(schema, ids) for schema, (reason, ids) in zip(schemas, texts, strict=True) if reason == "stop"]
    valid = sum(_validates(codec.decode(ids), schema) for schema, ids in finished)
    masks_us = [us for schema, (_, ids) in zip(schemas, texts, strict=True) for us in _mask_times_us(pool, schema, ids)]
    figures |= {
        "schemas": len(schemas),
        "finished": len(finished),
        "valid_of_finished": valid,
        "mask_us": statistics.median(masks_us),
        "mask_p99_us": sorted(masks_us)[int(0.99 * len(masks_us))],
        "apply_us_per_row": _apply_us(info.vocab_size),
    }
    print(json.dumps({name: round(v, 2) if isinstance(v, float) else v for name, v in figures.items()}, indent=1))
    pool.close()
    runner.close()


def _compile_times_ms(pool: GrammarPool, schemas: Sequence[Schema]) -> list[float]:
    times = []
    for schema in schemas:
        started_s = time.perf_counter()
        pool.submit(Grammar("json_schema", json.dumps(schema))).result()
        times.append(_ms_since(started_s))
    return times


def _outputs(
    core: EngineCore, codec: TextCodec, schemas: Sequence[Schema], max_tokens: int
) -> list[tuple[str, list[int]]]:
    """Return why each output ended, and its tokens."""
    prompt_ids = codec.encode(PROMPT, parse_special=True)
    tokens: list[list[int]] = [[] for _ in schemas]
    reasons = [""] * len(schemas)
    for index, schema in enumerate(schemas):
        sampling = SamplingParams(temperature=1.0, seed=index, max_tokens=max_tokens)
        grammar = Grammar("json_schema", json.dumps(schema))
        core.submit(GenerateRequest(request_id=str(index), prompt_ids=prompt_ids, sampling=sampling, grammar=grammar))
    while core.has_work:
        for output in core.step():
            tokens[int(output.request_id)] += output.token_ids
            reasons[int(output.request_id)] = output.finish_reason or ""
    return list(zip(reasons, tokens, strict=True))


def _mask_times_us(pool: GrammarPool, schema: Schema, ids: Sequence[int]) -> list[float]:
    """A token's mask and the step to the next."""
    matcher = pool.submit(Grammar("json_schema", json.dumps(schema))).result().start(())
    times = []
    for token_id in ids:
        started_s = time.perf_counter()
        matcher.mask()
        matcher.advance(token_id)
        times.append(1e6 * (time.perf_counter() - started_s))
    return times


def _apply_us(vocab_size: int, rows: int = 8, repeats: int = 50) -> float:
    masks = TokenMasks(vocab_size, torch.device("cpu"))
    logits = torch.randn(rows, vocab_size)
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (rows, -(-vocab_size // 32)), dtype=np.int32)
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        masks.apply(logits, np.arange(rows), words)
        times.append(1e6 * (time.perf_counter() - started_s) / rows)
    return statistics.median(times)


def _validates(text: str, schema: Schema) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def _ms_since(started_s: float) -> float:
    return 1e3 * (time.perf_counter() - started_s)


if __name__ == "__main__":
    main()
