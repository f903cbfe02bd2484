"""What routing by prefix is worth: two workers with a real model, and prompts that begin with one of many prefixes.

    python -m benchmarks.replicas [--rounds 5] [--prefixes 20] [--prefix-tokens 512] [--out FILE]

Two gateways route to the same two `headrace worker`s, each with another policy, and are asked in turns: the same
requests for both in a round, every turn from empty caches. All prefixes together are twice what one worker's KV cache
holds and a little more than both hold beside what runs, as with the system prompts of a service's tenants. A turn's
first requests, which meet empty caches, are not counted. The limit is on TTFT, in the median, of `prefix` over that of
`round_robin`.

Rounds of equal settings are added to those that FILE has.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import signal
import statistics
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks.peer_servers import RUN_HEADRACE, RunningServer, ServerCommand
from server.bench.serve_client import RequestOptions
from server.bench.serve_lengths import Lengths
from server.bench.serve_load import Load
from server.bench.serve_records import Latency, latency
from server.bench.serve_run import ServeBench, measure
from server.bench.serve_workload import Workload
from server.version import VERSION

REFERENCE, ROUTED = "round_robin", "prefix"
MOST = 0.5
"""TTFT p50 of the second over that of the first."""

WORKERS = 2


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's part of a round. Of the requests that count, `cached_share` of the prompt tokens were cached."""

    round: int
    policy: str
    requests: int
    failed: int
    cached_share: float
    ttft_ms: Latency
    e2e_ms: Latency


class Result(msgspec.Struct, frozen=True, kw_only=True):
    headrace: str
    machine: dict[str, str]
    settings: dict[str, str | int | float]
    turns: list[Turn]
    ttft_p50_ms: dict[str, float]
    ratio: float
    """Of the medians over rounds."""


def main() -> None:
    options = _options()
    # So that what was started is ended as well.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    earlier = _earlier(options)
    first = 1 + max((turn.round for turn in earlier), default=-1)
    with tempfile.TemporaryDirectory(prefix="hr-") as name, ExitStack() as stack:
        directory = Path(name)
        workers = [_started(stack, directory, _worker(options, directory, number)) for number in range(WORKERS)]
        gateways = {
            policy: _started(stack, directory, _gateway(policy, workers, directory)) for policy in (REFERENCE, ROUTED)
        }
        turns = earlier
        for number in range(first, first + options.rounds):
            turns += asyncio.run(_round(options, number, workers, gateways))
            result = _result(options, turns)
            if options.out is not None:  # after each: what was measured is kept, whatever comes
                options.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    print(f"TTFT p50: {result.ttft_p50_ms}, ratio {result.ratio:.2f}, at most {MOST}: ", end="")
    print("kept" if result.ratio <= MOST else "NOT KEPT")


def _earlier(options: argparse.Namespace) -> list[Turn]:
    """Return the turns that the file has of these settings."""
    if options.out is None or not options.out.exists():
        return []
    result = msgspec.json.decode(options.out.read_bytes(), type=Result)
    if result.settings != _settings(options):
        raise SystemExit(f"{options.out} has rounds of other settings; give another --out.")
    return result.turns


def _settings(options: argparse.Namespace) -> dict[str, str | int | float]:
    return {name: value for name, value in vars(options).items() if name not in ("rounds", "out")}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefixes", type=int, default=20)
    parser.add_argument("--prefix-tokens", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=48, help="behind the prefix, of each request alone")
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--kv-cache-memory", default="104MiB", help="of each worker: 4,700 tokens of SmolLM2 135M")
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--requests", type=int, default=36, help="of a turn")
    parser.add_argument("--uncounted", type=int, default=18, help="of these, the first, while the caches fill")
    parser.add_argument("--out", type=Path, metavar="FILE")
    return parser.parse_args()


# Processes


def _worker(options: argparse.Namespace, directory: Path, number: int) -> ServerCommand:
    flags = (
        "--threads=1",
        "--max-model-len=2048",
        f"--kv-cache-memory={options.kv_cache_memory}",
        "--http-port={port}",
    )
    listen = f"--listen=ipc://{directory}/w{number}"
    return _command(f"worker-{number}", directory, "worker", options.model, listen, *flags)


def _gateway(policy: str, workers: list[RunningServer], directory: Path) -> ServerCommand:
    register = "--register=static:" + ",".join(worker.url for worker in workers)
    return _command(f"gateway-{policy}", directory, "gateway", register, f"--routing-policy={policy}", "--port={port}")


def _command(name: str, directory: Path, *arguments: str) -> ServerCommand:
    return ServerCommand(
        name=name,
        version=VERSION,
        command=(sys.executable, "-c", RUN_HEADRACE, *arguments),
        shown=" ".join(("headrace", *arguments)),
        ready_path="/ready",
        environment={"HEADRACE_STATE_DIR": str(directory / name), "OMP_NUM_THREADS": "1"},
    )


def _started(stack: ExitStack, directory: Path, command: ServerCommand) -> RunningServer:
    server = RunningServer(command, directory / f"{command.name}.log")
    stack.callback(server.stop)
    server.wait_ready()
    return server


def _forget(worker: RunningServer) -> None:
    request = urllib.request.Request(f"{worker.url}/admin/reset_prefix_cache", method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()


# Rounds


async def _round(
    options: argparse.Namespace, number: int, workers: list[RunningServer], gateways: dict[str, RunningServer]
) -> list[Turn]:
    turns: list[Turn] = []
    policies = list(gateways)
    for place in range(len(policies)):
        policy = policies[(number + place) % len(policies)]  # nobody is always the first
        for worker in workers:
            await asyncio.to_thread(_forget, worker)
        turn = await _turn(options, number, policy, gateways[policy].url)
        turns.append(turn)
        print(
            f"round {number}: {policy:12} TTFT p50 {turn.ttft_ms.p50:7.1f} ms, p90 {turn.ttft_ms.p90:7.1f} ms,"
            f" {turn.cached_share:.0%} cached, {turn.failed} failed",
            flush=True,
        )
    return turns


async def _turn(options: argparse.Namespace, number: int, policy: str, url: str) -> Turn:
    workload = Workload(
        prompt=Lengths("fixed", options.prompt_tokens),
        output=Lengths("fixed", options.output_tokens),
        shared_prefix_tokens=options.prefix_tokens,
        shared_prefixes=options.prefixes,
        seed=number,
    )
    load = Load(concurrency=options.concurrency, requests=options.requests)
    bench = ServeBench(url=url, options=RequestOptions(), workload=workload, load=load, warm_up=1)
    records = (await measure(bench)).requests
    counted = [record for record in records if record.conversation >= options.uncounted]
    done = [record for record in counted if record.error is None]
    ttft_ms, e2e_ms = latency(one.ttft_s for one in done), latency(one.e2e_s for one in done)
    if ttft_ms is None or e2e_ms is None:
        raise SystemExit(f"no request of round {number} was answered through {policy}")
    return Turn(
        round=number,
        policy=policy,
        requests=len(counted),
        failed=len(counted) - len(done),
        cached_share=sum(one.cached_tokens or 0 for one in done) / sum(one.prompt_tokens or 0 for one in done),
        ttft_ms=ttft_ms,
        e2e_ms=e2e_ms,
    )


def _result(options: argparse.Namespace, turns: list[Turn]) -> Result:
    medians = {
        policy: statistics.median(turn.ttft_ms.p50 for turn in turns if turn.policy == policy)
        for policy in (REFERENCE, ROUTED)
    }
    return Result(
        headrace=VERSION,
        machine={"system": platform.platform(), "python": platform.python_version()},
        settings=_settings(options),
        turns=turns,
        ttft_p50_ms={policy: round(value, 2) for policy, value in medians.items()},
        ratio=medians[ROUTED] / medians[REFERENCE],
    )


if __name__ == "__main__":
    main()
