"""`headrace bench`: measurements of the engine here, and of servers anywhere."""

from __future__ import annotations

from pathlib import Path

import click

from server.cli.bench_serve import serve
from server.cli.common import debug_option


@click.group(short_help="Measure the engine or a server.")
@debug_option
def bench() -> None:
    """Measure the engine against what this machine could do, or a server over HTTP."""


bench.add_command(serve)


@bench.command(short_help="The engine alone, with random weights.")
@click.option("--shapes", default="qwen3-0.6b", metavar="NAME", help="The model's shape. [qwen3-0.6b]")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", help="Where it runs. [cuda]")
@click.option("--numerics", type=click.Choice(["default", "invariant"]), default="default", help="[default]")
@click.option("--weights", type=click.Choice(["dtype", "fp8"]), default="dtype", help="fp8: in 8 bits. [dtype]")
@click.option("--kv-dtype", type=click.Choice(["dtype", "fp8"]), default="dtype", help="fp8: KV in 8 bits. [dtype]")
@click.option("--where", type=click.Choice(["process", "in-process", "both"]), default="process", help="[process]")
@click.option("--max-running", type=click.IntRange(min=1), default=256, help="Requests that run at once. [256]")
@click.option("--max-step-tokens", type=click.IntRange(min=1), default=8192, help="Tokens of one step. [8192]")
@click.option("--max-model-len", type=click.IntRange(min=256), default=16384, help="[16384]")
@click.option("--in-flight-steps", type=click.IntRange(1, 2), help="1 does not overlap. [2 on a GPU]")
@click.option("--no-prefix-cache", is_flag=True, help="Compute every prompt anew.")
@click.option("--batches", metavar="N,N", help="Batches of the decode figures.")
@click.option("--shared-runs", type=click.IntRange(min=1), help="How often the shared bench runs.")
@click.option("--trial", is_flag=True, help="A few seconds of everything, to see that it runs.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the record there, as JSON.")
@debug_option
def engine(
    shapes: str,
    device: str,
    numerics: str,
    weights: str,
    kv_dtype: str,
    where: str,
    max_running: int,
    max_step_tokens: int,
    max_model_len: int,
    in_flight_steps: int | None,
    no_prefix_cache: bool,
    batches: str | None,
    shared_runs: int | None,
    trial: bool,
    out: Path | None,
) -> None:
    """Measure the engine with random weights, each figure beside its floor.

    The floor is what the bytes and operations of the work take at the bandwidth and the matrix rate that are measured
    first. The engine runs in its own process behind the wire, as under `headrace serve`, or in this one.
    """
    import msgspec

    from engine.config import EngineConfig
    from server.bench.engine import TRIAL, BenchPlan, Where, run

    plan = TRIAL if trial else BenchPlan()
    if batches is not None:
        plan = msgspec.structs.replace(plan, decode_batches=tuple(int(one) for one in batches.split(",")))
    if shared_runs is not None:
        plan = msgspec.structs.replace(plan, shared_runs=shared_runs)
    config = msgspec.convert(
        {
            "model": f"random:{shapes}",
            "device": device,
            "numerics": numerics,
            "weights": weights,
            "kv_dtype": kv_dtype,
            "max_running": max_running,
            "max_step_tokens": max_step_tokens,
            "max_model_len": max_model_len,
            "in_flight_steps": in_flight_steps,
            "prefix_cache": not no_prefix_cache,
        },
        EngineConfig,
    )
    places: tuple[Where, ...] = ("process", "in-process")
    run(shapes, config, plan, [place for place in places if where in (place, "both")], out)
