"""`headrace bench engine`: step time by batch and context, prompt throughput, first tokens, and the shared bench.

Each figure stands beside its floor (server/bench/floors.py), computed with ceilings that were measured in the same run.
Weights are random in a published model's shape and nothing is read from files. Knows no devices: engine/runner/
ceilings.py measures in a process of its own.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from engine.config import EngineConfig
from engine.models.llama_config import LlamaConfig
from server.bench.drivers import Driver, LocalDriver, RemoteDriver, Timeline, measure_ceilings
from server.bench.floors import Ceilings, ModelCosts
from server.bench.workloads import Workload, again, decode, prefill, shared

Where = Literal["process", "in-process"]

_LINE = "{where:10s} {name:20s} {value:>12s} {unit:9s} floor {floor:>9s}  share {share:>5s}  {more}"


class BenchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. Contexts are tokens before the first output; `prompts` are (count, length)."""

    decode_batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    decode_contexts: tuple[int, ...] = (1024,)
    decode_outputs: int = 128
    prompts: tuple[tuple[int, int], ...] = ((1, 1024), (1, 8192), (8, 2048), (64, 512))
    prompt_runs: int = 5
    cached_prompt: int = 8192
    shared_temperatures: tuple[float, ...] = (0.6, 0.0)
    shared_runs: int = 2
    shared_scale: float = 1.0


TRIAL = BenchPlan(
    decode_batches=(1, 3),
    decode_contexts=(24,),
    decode_outputs=12,
    prompts=((1, 40), (3, 20)),
    prompt_runs=2,
    cached_prompt=200,
    shared_temperatures=(0.6,),
    shared_runs=1,
    shared_scale=0.03,
)
"""A few seconds on a CPU, to see that everything runs."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """`value` is the median of `runs`; the floor is in the same unit, None without ceilings."""

    where: Where
    name: str
    unit: str
    value: float
    runs: tuple[float, ...]
    floor: float | None = None
    share: float | None = None
    more: dict[str, float] = {}


class Record(msgspec.Struct, frozen=True, kw_only=True):
    benchmark: str
    model: str
    config: EngineConfig
    plan: BenchPlan
    versions: dict[str, str]
    cores: int
    ceilings: Ceilings | None
    engine: dict[str, str | int]
    figures: tuple[Figure, ...]


def run(shape: str, config: EngineConfig, plan: BenchPlan, where: Sequence[Where], out: Path | None) -> Record:
    """Measure, print a line for each figure, and write the record to `out` after each engine."""
    import engine.runner  # first: it settles how torch's threads wait, before torch is loaded
    from engine.loader.random_shapes import SHAPES

    assert engine.runner
    ceilings = None
    if config.device != "cpu":
        rows = [] if config.device == "auto" else plan.decode_batches
        ceilings = msgspec.json.decode(measure_ceilings(config.model, rows), type=Ceilings)
        print(f"{ceilings.device}: {ceilings.copy_tb_s:.2f} TB/s, {ceilings.matmul_tflop_s:.0f} TFLOP/s", flush=True)
    figures: list[Figure] = []
    for place in where:
        with (RemoteDriver if place == "process" else LocalDriver)(config) as driver:
            in_bytes = {"fp8": 1}
            costs = ModelCosts.of(
                SHAPES[shape],
                layer_weight_bytes=in_bytes.get(config.weights, 2),
                kv_bytes=in_bytes.get(config.kv_dtype, 2),
            )
            bench = _Bench(driver, place, SHAPES[shape], costs, plan, ceilings, figures)
            bench.measure()
            record = Record(
                benchmark="engine",
                model=shape,
                config=config,
                plan=plan,
                versions={"python": platform.python_version()},
                cores=len(os.sched_getaffinity(0)),
                ceilings=ceilings,
                engine={
                    "device": driver.info.device,
                    "operators": driver.info.operators,
                    "dtype": driver.info.dtype,
                    "numerics": driver.info.numerics,
                    "kv_capacity_tokens": driver.info.kv_capacity_tokens,
                },
                figures=tuple(figures),
            )
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    return record


class _Bench:
    """One engine's figures, in an order in which the first ones warm up the rest."""

    def __init__(
        self,
        driver: Driver,
        where: Where,
        config: LlamaConfig,
        costs: ModelCosts,
        plan: BenchPlan,
        ceilings: Ceilings | None,
        figures: list[Figure],
    ) -> None:
        self._driver, self._where, self._plan = driver, where, plan
        self._vocab = config.vocab_size
        self._costs, self._ceilings, self._figures = costs, ceilings, figures
        self._rng = random.Random(1)

    def measure(self) -> None:
        self._add("start", "s", [self._driver.ready_s], None)
        self._run(prefill(self._rng, self._vocab, *self._plan.prompts[-1]))
        for context in self._plan.decode_contexts:
            for batch in self._plan.decode_batches:
                self._decode(batch, context)
        for count, length in self._plan.prompts:
            self._prefill(count, length)
        self._cached(self._plan.cached_prompt)
        for temperature in self._plan.shared_temperatures:
            self._shared(temperature)

    def _decode(self, batch: int, context: int) -> None:
        plan = self._plan
        timeline = self._run(decode(self._rng, self._vocab, batch, context, plan.decode_outputs))
        intervals = decode_intervals_s(timeline)
        step_ms = statistics.median(intervals) * 1e3
        floor, more = None, {"p99_ms": _quantile(intervals, 0.99) * 1e3, "tokens_per_s": batch / step_ms * 1e3}
        if self._ceilings is not None:
            # The measured steps are around the middle of the outputs.
            floor = self._costs.decode_step_s(batch, context + plan.decode_outputs // 2, self._ceilings) * 1e3
            products = self._ceilings.products_ms.get(str(batch))
            if products is not None:
                more |= {"products_ms": products, "of_products": step_ms / products}
        self._add(f"decode {batch} x {context}", "ms/step", [step_ms], floor, more)

    def _prefill(self, count: int, length: int) -> None:
        """The wall from sending to the last first token; at one prompt that is the time to first token."""
        walls, steps = [], 0
        for _ in range(self._plan.prompt_runs):
            timeline = self._run(prefill(self._rng, self._vocab, count, length))
            walls.append(timeline.wall_s * 1e3)
            steps = timeline.steps
        floor = None
        if self._ceilings is not None:
            floor = self._costs.prefill_s([length] * count, self._ceilings) * 1e3
        per_s = count * length / statistics.median(walls) * 1e3
        self._add(f"prefill {count} x {length}", "ms", walls, floor, {"tokens_per_s": per_s, "steps": steps})

    def _cached(self, length: int) -> None:
        """First token of a prompt whose blocks are all in the prefix cache."""
        walls, cached = [], 0
        for run_index in range(self._plan.prompt_runs):
            workload = prefill(self._rng, self._vocab, 1, length)
            self._run(workload)
            timeline = self._run(again(workload, run_index))
            cached = timeline.arrivals[0].cached_tokens
            walls.append(timeline.wall_s * 1e3)
        self._add(f"cached 1 x {length}", "ms", walls, None, {"cached_tokens": cached})

    def _shared(self, temperature: float) -> None:
        walls, steps = [], 0
        for run_index in range(self._plan.shared_runs):
            # Other token ids each time, or the prefix cache would answer.
            shift = 100 * self._plan.shared_temperatures.index(temperature) + run_index
            workload = shared(temperature, self._vocab, shift, self._plan.shared_scale)
            timeline = self._run(again(workload, run_index))
            walls.append(timeline.wall_s)
            steps = timeline.steps
        floor = None if self._ceilings is None else self._costs.workload_s(workload, self._ceilings)
        per_s = workload.output_tokens / statistics.median(walls)
        more = {"output_tokens_per_s": per_s, "output_tokens": workload.output_tokens, "steps": steps}
        self._add(workload.name, "s", walls, floor, more)

    def _run(self, workload: Workload) -> Timeline:
        return self._driver.run(workload.requests)

    def _add(
        self, name: str, unit: str, runs: Sequence[float], floor: float | None, more: dict[str, float] | None = None
    ) -> None:
        value = statistics.median(runs)
        figure = Figure(
            where=self._where,
            name=name,
            unit=unit,
            value=value,
            runs=tuple(runs),
            floor=floor,
            share=None if floor is None else floor / value,
            more=more or {},
        )
        self._figures.append(figure)
        print(_line(figure), flush=True)


def decode_intervals_s(timeline: Timeline) -> list[float]:
    """Return the times between a request's outputs, per token, while all requests decode; the first and the last two
    are cut off. The request that began last tells."""
    begin_s = max(one.times_s[0] for one in timeline.arrivals)
    end_s = min(one.times_s[-1] for one in timeline.arrivals)
    last = max(timeline.arrivals, key=lambda one: one.times_s[0])
    spans = zip(last.times_s, last.times_s[1:], last.tokens[1:], strict=False)
    intervals = [(after - before) / tokens for before, after, tokens in spans if before >= begin_s and after <= end_s]
    return intervals[2:-2] or intervals or [timeline.wall_s]


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def _line(figure: Figure) -> str:
    return _LINE.format(
        where=figure.where,
        name=figure.name,
        value=f"{figure.value:.3f}",
        unit=figure.unit,
        floor="-" if figure.floor is None else f"{figure.floor:.3f}",
        share="-" if figure.share is None else f"{figure.share:.2f}",
        more="  ".join(f"{key} {value:,.2f}" for key, value in figure.more.items()),
    )
