"""`headrace simulate`: routing policies side by side, without an engine or a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from server.cli.common import debug_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.simulate.report import Summary
    from router.simulate.workload import SimRequest

_POSITIVE = click.IntRange(min=1)
_AMOUNT = click.FloatRange(min=0, min_open=True)
_NOT_NEGATIVE = click.FloatRange(min=0)
_POLICIES = "prefix,sglang,least_tokens,least_requests,round_robin"


@click.command("simulate", short_help="Routing policies against simulated workers.")
@click.argument("trace", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--policies", default=_POLICIES, metavar="NAME,NAME", help=f"[{_POLICIES}]")
@click.option("--speeds", default="1", metavar="X,X", help="How many times faster than it was recorded or drawn. [1]")
@click.option(
    "--bursts", is_flag=True, help="Keep the times of a trace: rounded to seconds, so that requests coincide."
)
@click.option("--limit", type=_POSITIVE, help="Only so many requests.")
@click.option("--rate", type=_AMOUNT, default=8.0, help="Without a trace: requests/s at speed 1. [8]")
@click.option("--workers", type=_POSITIVE, default=8, help="[8]")
@click.option(
    "--decode-workers", type=click.IntRange(min=0), default=0, help="With these, the others only prefill. [0]"
)
@click.option("--gateways", type=_POSITIVE, default=1, help="[1]")
@click.option("--prefill-rate", type=_AMOUNT, default=20_000.0, help="Prompt tokens/s of one worker. [20000]")
@click.option("--attention-rate", type=_NOT_NEGATIVE, default=100e6, help="Context tokens/s that decoding reads. [1e8]")
@click.option("--weights-ms", type=_AMOUNT, default=20.0, help="The least time of a step. [20]")
@click.option("--chunk-tokens", type=_POSITIVE, default=2048, help="Prompt tokens of a step. [2048]")
@click.option("--cache-blocks", type=_POSITIVE, default=4000, help="KV blocks of 512 tokens of one worker. [4000]")
@click.option("--max-running", type=_POSITIVE, default=256, help="Requests that run at once. [256]")
@click.option("--transfer-rate", type=_AMOUNT, default=400_000.0, help="KV tokens/s to a decode worker. [400000]")
@click.option("--events-ms", type=_NOT_NEGATIVE, default=10.0, help="How late KV events come. [10]")
@click.option("--sharing-ms", type=_NOT_NEGATIVE, default=20.0, help="How late gateways learn of each other. [20]")
@click.option("--no-sharing", is_flag=True, help="Gateways know nothing of each other.")
@click.option("--budget", type=_AMOUNT, metavar="S", help="Seconds of prompts that may be under way. [as the server]")
@click.option("--slo-ttft", type=_AMOUNT, default=2000.0, metavar="MS", help="Goodput: the longest TTFT. [2000]")
@click.option("--slo-tpot", type=_AMOUNT, metavar="MS", help="Goodput: the longest TPOT.")
@click.option("--seed", type=int, default=0, help="[0]")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the result there, as JSON.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png", help="Draw it there.")
@debug_option
def simulate_command(
    trace: Path | None,
    policies: str,
    speeds: str,
    bursts: bool,
    limit: int | None,
    rate: float,
    workers: int,
    decode_workers: int,
    gateways: int,
    prefill_rate: float,
    attention_rate: float,
    weights_ms: float,
    chunk_tokens: int,
    cache_blocks: int,
    max_running: int,
    transfer_rate: float,
    events_ms: float,
    sharing_ms: float,
    no_sharing: bool,
    budget: float | None,
    slo_ttft: float,
    slo_tpot: float | None,
    seed: int,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Run the router's own code against a model of workers, in virtual time.

    TRACE is a file in the format of the Mooncake traces; without one, conversations are drawn at random. The model of a
    worker is described in docs/simulator.md. The same arguments give the same figures.
    """
    import msgspec

    from router.admission import AdmissionLimits
    from router.simulate.gateway import Delays
    from router.simulate.run import Cluster, simulate
    from router.simulate.table import table
    from router.simulate.worker import WorkerModel

    cluster = Cluster(
        workers=workers,
        decode_workers=decode_workers,
        gateways=gateways,
        seed=seed,
        worker=WorkerModel(
            prefill_rate=prefill_rate,
            attention_rate=attention_rate,
            weights_s=weights_ms / 1e3,
            chunk_tokens=chunk_tokens,
            cache_blocks=cache_blocks,
            max_running=max_running,
        ),
        delays=Delays(events_s=events_ms / 1e3, sharing_s=None if no_sharing else sharing_ms / 1e3),
        admission=AdmissionLimits() if budget is None else AdmissionLimits(budget_s=budget),
        transfer_rate=transfer_rate,
        slo_ttft_s=slo_ttft / 1e3,
        slo_tpot_s=None if slo_tpot is None else slo_tpot / 1e3,
    )
    names = [name.strip() for name in policies.split(",")]
    _check_names(names)
    results: dict[str, list[Summary]] = {}
    for speed in _numbers(speeds):
        requests = _requests(trace, speed, rate, limit, seed, bursts)
        title = f"speed {speed:g}: {len(requests)} requests in {requests[-1].arrival_s:.0f} s"
        results[title] = [simulate(msgspec.structs.replace(cluster, policy=name), requests) for name in names]
        click.echo(table(title, results[title]) + "\n")
    if out is not None:
        out.write_bytes(msgspec.json.encode({"cluster": cluster, "loads": results}))
    if plot is not None:
        from router.simulate.plot import draw

        draw(results, cluster.slo_ttft_s).savefig(plot)


def _check_names(names: Sequence[str]) -> None:
    from router.policies.registry import POLICY_NAMES

    for name in names:
        if name not in POLICY_NAMES:
            known = ", ".join(POLICY_NAMES)
            raise click.BadParameter(f"There is no policy {name!r}; there are {known}.", param_hint="'--policies'")


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) <= 0:
        raise click.BadParameter(f"{text!r} is not a list of positive numbers.", param_hint="'--speeds'")
    return numbers


def _requests(
    trace: Path | None, speed: float, rate: float, limit: int | None, seed: int, bursts: bool
) -> list[SimRequest]:
    from router.simulate.workload import Conversations, read_trace

    if trace is None:
        return Conversations(rate=rate * speed, requests=limit or 2000).draw(seed)
    requests = read_trace(trace, speed=speed, limit=limit, spread_seed=None if bursts else seed)
    if not requests:
        raise click.BadParameter("It has no request.", param_hint="'TRACE'")
    return requests
