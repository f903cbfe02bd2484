"""Host time of the engine core per step, with a runner that computes nothing.

    python -m benchmarks.engine_core [--runs 5] [--steps 300]

CPU time of the core's thread, so that a busy machine does not count; the runner's own (making results) is taken out.
Each line is the median over runs of the median step. steps/s is what the host could drive if the device took no time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.plan import RowResult, StepPlan, StepResult
from engine.protocol import GenerateRequest, KVGroupSpec, SamplingParams
from tests.support.infos import engine_info

MAX_STEP_TOKENS = 8192
FULL = (KVGroupSpec(),)
MIXED = (KVGroupSpec(), KVGroupSpec(kind="sliding_window", window_tokens=1024))


class NullRunner:
    """Answers every row with token 1 and counts the seconds it spends doing so."""

    def __init__(self, max_in_flight: int) -> None:
        self._plans: list[StepPlan] = []
        self._max_in_flight = max_in_flight
        self.spent_s = 0.0

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def choose(self, masks: bytes) -> None:
        raise AssertionError("no plan of this benchmark has masks")

    def collect(self, *, block: bool) -> Sequence[StepResult]:
        if not block:
            return ()
        begin_s = time.thread_time()
        plan = self._plans.pop(0)
        rows = tuple(RowResult(row.slot, (1,) if row.sample else ()) for row in plan.rows)
        self.spent_s += time.thread_time() - begin_s
        return (StepResult(plan.step, rows),)

    def close(self) -> None:
        self._plans.clear()


def make_core(
    specs: tuple[KVGroupSpec, ...], running: int, context: int, steps: int, in_flight: int
) -> tuple[EngineCore, NullRunner]:
    info = engine_info(max_model_len=2**20, kv_groups=specs, kv_capacity_tokens=2**24, max_running=running)
    config = EngineConfig(max_step_tokens=MAX_STEP_TOKENS, in_flight_steps=in_flight, max_running=running)
    runner = NullRunner(in_flight)
    # The first request goes on decoding while the last prompt is computed; none may end before the measured steps do.
    output = running * context // (MAX_STEP_TOKENS - running) + steps + 64
    blocks = running * ((context + output) // 64 + 2)
    core = EngineCore(info, config, runner, [blocks] * len(specs))
    for index in range(running):
        sampling = SamplingParams(seed=index, max_tokens=output)
        prompt = [(index * 7 + position) % 999 + 1 for position in range(context)]
        core.submit(GenerateRequest(request_id=f"request-{index}", prompt_ids=prompt, sampling=sampling))
    return core, runner


def median_step_ms(specs: tuple[KVGroupSpec, ...], running: int, context: int, steps: int, in_flight: int) -> float:
    core, runner = make_core(specs, running, context, steps, in_flight)
    while core.load().queued_uncached_tokens > 0 or len(core.scheduler.running) < running:  # prompts first
        core.step()
    times = []
    for _ in range(steps):
        runner.spent_s = 0.0
        begin_s = time.thread_time()
        core.step()
        times.append(time.thread_time() - begin_s - runner.spent_s)
        assert len(core.scheduler.running) == running
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    print(f"{'running':>8} {'context':>8} {'in flight':>10} {'groups':>15} {'ms/step':>8} {'us/row':>7} {'steps/s':>8}")
    for running, context, in_flight, specs in (
        (1, 64, 1, FULL),
        (64, 64, 1, FULL),
        (256, 64, 1, FULL),
        (256, 64, 2, FULL),
        (256, 4096, 1, FULL),
        (256, 4096, 2, FULL),
        (256, 4096, 2, MIXED),
    ):
        runs = [median_step_ms(specs, running, context, arguments.steps, in_flight) for _ in range(arguments.runs)]
        ms = statistics.median(runs)
        groups = "+".join(spec.kind.split("_")[0] for spec in specs)
        line = f"{running:>8} {context:>8} {in_flight:>10} {groups:>15}"
        print(f"{line} {ms:>8.3f} {ms * 1e3 / running:>7.2f} {1e3 / ms:>8.0f}", flush=True)


if __name__ == "__main__":
    main()
