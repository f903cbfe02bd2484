"""Where a prompt's time to its first token goes within an engine on a GPU, without a wire.

    python3 -m benchmarks.gpu_prompt --model random:qwen3-0.6b [--lengths 1024,8192] [--runs 30]

Each length twice: computed, and found in the prefix cache. Shown are medians in microseconds: taking the request
(`submit`), scheduling it and launching the step (`step`, of which `launch` is the runner's), the device's time between
the launch's two ends (`device`), waiting for the result, and all of it; and with `--wire` what comes on top when the
engine has a process of its own.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence

import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.plan import StepPlan
from engine.protocol import GenerateRequest
from engine.runner.build import build_engine
from engine.runner.runner import TorchRunner
from server.bench.drivers import RemoteDriver
from server.bench.workloads import again, prefill

Times = dict[str, float]


class TimedRunner:
    """A runner, and what its last launch took on the host and on the device."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self.launch_s = 0.0
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> None:
        begin_s = time.perf_counter()
        self._begin.record()
        self._runner.launch(plan)
        self._end.record()
        self.launch_s = time.perf_counter() - begin_s

    @property
    def device_s(self) -> float:
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3


def timed(core: EngineCore, runner: TimedRunner, request: GenerateRequest) -> Times:
    begin_s = time.perf_counter()
    core.submit(request)
    taken_s = time.perf_counter()
    done = [output for output in core.step() if output.token_ids]
    stepped_s = time.perf_counter()
    steps = 1
    while not done:
        done = [output for output in core.step() if output.token_ids]
        steps += 1
    end_s = time.perf_counter()
    while core.has_work:
        core.step()
    return {
        "submit": taken_s - begin_s,
        "step": stepped_s - taken_s,
        "launch": runner.launch_s,
        "device": runner.device_s,
        "wait": end_s - stepped_s,
        "all": end_s - begin_s,
        "steps": steps / 1e6,
    }


def show(name: str, runs: Sequence[Times]) -> None:
    values = {key: statistics.median(one[key] for one in runs) * 1e6 for key in runs[0]}
    print(f"{name:24}" + "  ".join(f"{key} {value:7.0f}" for key, value in values.items()), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen3-0.6b")
    parser.add_argument("--lengths", default="1024,8192")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--wire", action="store_true")
    options = parser.parse_args()
    lengths = [int(part) for part in options.lengths.split(",")]
    config = EngineConfig(model=options.model, max_model_len=16384, kv_cache_memory_bytes=8 << 30)
    info, runner, num_blocks, _ = build_engine(config, lambda fraction, phase: None)
    watched = TimedRunner(runner)
    core = EngineCore(info, config, watched, num_blocks)  # type: ignore[arg-type]
    rng = random.Random(1)
    for length in lengths:
        computed, cached = [], []
        for run in range(options.runs):
            workload = prefill(rng, info.vocab_size, 1, length)
            computed.append(timed(core, watched, again(workload, 2 * run).requests[0]))
            cached.append(timed(core, watched, again(workload, 2 * run + 1).requests[0]))
        show(f"computed 1 x {length}", computed[2:])
        show(f"cached 1 x {length}", cached[2:])
    if options.wire:
        del core, watched, runner
        torch.cuda.empty_cache()
        _over_the_wire(config, info.vocab_size, lengths, options.runs)
    return 0


def _over_the_wire(config: EngineConfig, vocab_size: int, lengths: Sequence[int], runs: int) -> None:
    rng = random.Random(2)
    with RemoteDriver(config) as driver:
        for length in lengths:
            computed, cached = [], []
            for run in range(runs):
                workload = prefill(rng, vocab_size, 1, length)
                computed.append({"all": driver.run(again(workload, 2 * run).requests).wall_s})
                cached.append({"all": driver.run(again(workload, 2 * run + 1).requests).wall_s})
            show(f"wire computed 1 x {length}", computed[2:])
            show(f"wire cached 1 x {length}", cached[2:])


if __name__ == "__main__":
    sys.exit(main())
