"""Speed of the runner alone, without scheduler or server: decode tokens/s by batch size, prefill tokens/s by length.

    python -m benchmarks.runner_speed [--model smollm2] [--dtype bfloat16] [--numerics default] [--threads 2]

Medians over steps; `GFLOP/s` is of the weight products, to set beside what the machine's own matrix product reaches.
"""

from __future__ import annotations

# First of all imports: it settles how torch's threads wait, which torch reads once.
import engine.runner  # noqa: F401  # isort: skip

import argparse
import random
import statistics
import time

import torch

from benchmarks.accuracy import load
from benchmarks.plan_driver import PlanDriver
from engine.loader.load import LoadedModel


def decode_step_s(loaded: LoadedModel, batch: int, context: int, steps: int) -> float:
    driver = PlanDriver(loaded, num_blocks=batch * (-(-(context + steps + 1) // 64)) + 1, max_slots=batch, keep=False)
    sequences = [driver.open(_tokens(loaded, context)) for _ in range(batch)]
    for sequence in sequences:
        driver.prefill(sequence, context)
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        driver.step([(sequence, 1) for sequence in sequences], on_device=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def prefill_s(loaded: LoadedModel, tokens: int, repeats: int) -> float:
    driver = PlanDriver(loaded, num_blocks=-(-tokens // 64) + 1, keep=False)
    times = []
    for _ in range(repeats):
        sequence = driver.open(_tokens(loaded, tokens))
        started = time.perf_counter()
        driver.prefill(sequence, tokens)
        times.append(time.perf_counter() - started)
        driver.close(sequence)
    return statistics.median(times)


def _tokens(loaded: LoadedModel, count: int) -> list[int]:
    return random.Random(count).choices(range(loaded.vocab_size), k=count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--numerics", default="default")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load(arguments.model, arguments.dtype, arguments.numerics)
    weights = sum(part.numel() for _, part in loaded.module.named_parts() if part.dim() == 2)
    print(f"{arguments.model}, {arguments.dtype}, {arguments.numerics}, {arguments.threads} threads")
    for batch in (1, 4, 16, 64):
        step_s = decode_step_s(loaded, batch, arguments.context, arguments.steps)
        rate = 2e-9 * weights * batch / step_s
        print(
            f"decode, batch {batch:3}: {batch / step_s:7.1f} tokens/s, {step_s * 1e3:6.1f} ms/step, {rate:5.0f} GFLOP/s"
        )
    for tokens in (32, 128, 512):
        duration_s = prefill_s(loaded, tokens, 5)
        print(f"prefill, {tokens:4} tokens: {tokens / duration_s:7.1f} tokens/s")


if __name__ == "__main__":
    main()
