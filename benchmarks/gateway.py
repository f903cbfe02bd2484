"""What a gateway adds: latency at a rate of requests, and CPU time per token that it relays. Needs psutil.

    python -m benchmarks.gateway [--rate 300] [--seconds 8] [--rounds 5] [--tokens 8] [--streams 64] [--out FILE]

One API process routes to two engines without a model behind the real wire, with SmolLM2's text. Clients, gateway and
engines are processes of their own and share the machine's cores, so every round has its references:

added     from the moment when the prompt's ids were there to the engine's receipt of the request, and from its first
          token to the client's receipt of that: what the gateway takes, with both ways through the kernel and the wire.
          Before it come HTTP, JSON, template and tokeniser: "whole" counts them too
bare      the same client, at the same rate, asks an ASGI application that answers with constant bytes at once
fleet     CPU time per token of all that lies below the HTTP layer, in a process that has only that
frames    CPU time per token of reading the same messages from the same engines, and of nothing else

Wall times of a machine whose cores are all in use say as much of its scheduler as of the gateway; CPU times do not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import uvicorn

from benchmarks.gateway_client import Answer, Load, run
from benchmarks.gateway_engine import Note
from benchmarks.gateway_relay import RelayTask, Spent, records_at
from benchmarks.readiness import wait_ready
from server.api_spec import ApiSpec
from server.bench.serve_records import percentile
from server.config import ServeConfig

ENGINES = 2
MOST_P50_MS, MOST_P99_MS, MOST_TOKEN_US = 1.0, 5.0, 20.0
"""What the gateway is to keep: of added latency, and of CPU per token below HTTP."""

WARM_UP_S = 2.0
CONTEXT = multiprocessing.get_context("spawn")


class Spread(msgspec.Struct, frozen=True):
    """Milliseconds."""

    p50: float
    p90: float
    p99: float


@dataclass
class HttpServer:
    url: str
    process: psutil.Process


class Round(msgspec.Struct, kw_only=True):
    """CPU of the API process is per request, all of it: HTTP, text and tokens; that of the bare server beside it.
    `busy` is the share of the machine's cores that were in use."""

    requests: int
    api_cpu_us_per_request: float
    bare_cpu_us_per_request: float
    busy: float
    bare_ms: Spread
    fleet_us_per_token: float
    frames_us_per_token: float
    added_ms: Spread | None = None
    to_engine_ms: Spread | None = None
    from_engine_ms: Spread | None = None
    whole_ms: Spread | None = None
    send_delay_ms: Spread | None = None


class Result(msgspec.Struct, kw_only=True):
    settings: dict[str, float]
    machine: dict[str, str | int]
    rounds: list[Round]
    medians: dict[str, float]


def main() -> None:
    options = _options()
    # So that what was started is ended as well.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="hr-") as name, ExitStack() as stack:
        directory = Path(name)
        addresses = tuple(f"ipc://{directory}/e{number}" for number in range(ENGINES))
        notes = [directory / f"engine-{number}" for number in range(ENGINES)]
        for address, file in zip(addresses, notes, strict=True):
            stack.enter_context(_python("benchmarks.gateway_engine", address, str(options.pace_ms), str(file)))
        relay = stack.enter_context(_python("benchmarks.gateway_relay", pipes=True))
        bare = stack.enter_context(_bare(options.tokens))
        with _gateway(addresses, directory / "api") as gateway:
            rounds, answers = _measure(options, gateway, bare, relay, addresses)
        stack.close()  # the engines write their notes as they end
        _put_together(rounds, answers, directory / "api", notes)
    result = Result(settings=_settings(options), machine=_machine(), rounds=rounds, medians=_medians(rounds))
    _print(result)
    if options.out is not None:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=300, help="requests per second, as a Poisson process")
    parser.add_argument("--seconds", type=float, default=8, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-bytes", type=int, default=2048)
    parser.add_argument("--ids", action="store_true", help="prompts are token ids: nothing has to be tokenised")
    parser.add_argument("--tokens", type=int, default=8, help="of an answer at that rate")
    parser.add_argument("--pace-ms", type=float, default=10, help="between two tokens of a stream")
    parser.add_argument("--streams", type=int, default=64, help="at once, for the CPU time per token")
    parser.add_argument("--stream-tokens", type=int, default=200, help="of each of them")
    parser.add_argument("--out", type=Path, metavar="FILE")
    return parser.parse_args()


def _settings(options: argparse.Namespace) -> dict[str, float]:
    return {name: value for name, value in vars(options).items() if name != "out"}


def _machine() -> dict[str, str | int]:
    return {"cores": len(os.sched_getaffinity(0)), "system": platform.platform(), "python": platform.python_version()}


# Processes


@contextmanager
def _python(module: str, *arguments: str, pipes: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE if pipes else None
    process = subprocess.Popen([sys.executable, "-m", module, *arguments], stdin=pipe, stdout=pipe)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _gateway(addresses: tuple[str, ...], notes_file: Path) -> Iterator[HttpServer]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        spec = ApiSpec(
            config=ServeConfig(log_level="warning"), listen_fd=listener.fileno(), workers=records_at(addresses)
        )
        command = [sys.executable, "-m", "benchmarks.gateway_api", str(notes_file)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(spec.listen_fd,))
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(spec) + b"\n")
            process.stdin.close()
            wait_ready(url, "the gateway")
            yield HttpServer(url, psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait()


@contextmanager
def _bare(tokens: int) -> Iterator[HttpServer]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = CONTEXT.Process(target=serve_constant, args=(listener, tokens))
        server.start()
        try:
            yield HttpServer(f"http://127.0.0.1:{listener.getsockname()[1]}", psutil.Process(server.pid))
        finally:
            server.kill()
            server.join()


def serve_constant(listener: socket.socket, tokens: int) -> None:
    """The cheapest server of such an answer: the same HTTP server, an application that reads a body and streams."""
    event = b'data: {"id":"bare","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'

    async def app(scope: dict, receive: object, send: object) -> None:  # type: ignore[type-arg]
        while (await receive())["more_body"]:  # type: ignore[operator]
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        for _ in range(tokens):
            await send({"type": "http.response.body", "body": event, "more_body": True})  # type: ignore[operator]
        await send({"type": "http.response.body"})  # type: ignore[operator]

    config = uvicorn.Config(app, loop="uvloop", http="httptools", lifespan="off", access_log=False, log_level="error")
    config.timeout_keep_alive = 120
    uvicorn.Server(config).run([listener])


# Rounds


def _measure(
    options: argparse.Namespace,
    gateway: HttpServer,
    bare: HttpServer,
    relay: subprocess.Popen[bytes],
    addresses: tuple[str, ...],
) -> tuple[list[Round], list[list[Answer]]]:
    rounds, all_answers = [], []
    for server in (bare, gateway):
        _ask(server, _load(options, WARM_UP_S, -1))
    for number in range(options.rounds):
        load = _load(options, options.seconds, number)
        bare_asked, asked = _ask(bare, load), _ask(gateway, load)
        frames, fleet = (
            _relayed(relay, RelayTask(kind=kind, addresses=addresses, **_streams(options)))
            for kind in ("frames", "fleet")
        )
        rounds.append(
            Round(
                requests=len(asked.answers),
                api_cpu_us_per_request=asked.cpu_us,
                bare_cpu_us_per_request=bare_asked.cpu_us,
                busy=asked.busy,
                bare_ms=_spread([one.first_s - one.sent_s for one in bare_asked.answers]),
                fleet_us_per_token=_per_token_us(fleet),
                frames_us_per_token=_per_token_us(frames),
            )
        )
        all_answers.append(asked.answers)
        print(f"round {number}: {asked.cpu_us:.0f} us a request, {_per_token_us(fleet):.1f} us a token", flush=True)
    return rounds, all_answers


@dataclass
class Asked:
    """`cpu_us` is the server's per request, `busy` the share of the machine's cores that were in use."""

    answers: list[Answer]
    cpu_us: float
    busy: float


def _ask(server: HttpServer, load: Load) -> Asked:
    with CONTEXT.Pool(1) as pool:
        before, _ = _cpu_s(server.process), psutil.cpu_percent()
        answers = pool.apply(run, (server.url, load))
        busy, spent_s = psutil.cpu_percent() / 100, _cpu_s(server.process) - before
    if short := [one for one in answers if one.events < load.tokens]:
        raise SystemExit(f"{len(short)} of {len(answers)} answers were not whole")
    return Asked(answers, spent_s / len(answers) * 1e6, busy)


def _load(options: argparse.Namespace, seconds: float, seed: int) -> Load:
    return Load(
        rate=options.rate,
        seconds=seconds,
        prompt_bytes=options.prompt_bytes,
        tokens=options.tokens,
        seed=seed,
        ids=options.ids,
    )


def _streams(options: argparse.Namespace) -> dict[str, int]:
    return {"streams": options.streams, "tokens": options.stream_tokens}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _relayed(relay: subprocess.Popen[bytes], task: RelayTask) -> Spent:
    assert relay.stdin is not None
    assert relay.stdout is not None
    relay.stdin.write(msgspec.json.encode(task) + b"\n")
    relay.stdin.flush()
    spent = msgspec.json.decode(relay.stdout.readline(), type=Spent)
    if spent.tokens != task.streams * task.tokens:
        raise SystemExit(f"{spent.tokens} tokens came, {task.streams * task.tokens} were due")
    return spent


def _per_token_us(spent: Spent) -> float:
    return spent.cpu_s / spent.tokens * 1e6


# Figures


def _put_together(rounds: list[Round], all_answers: list[list[Answer]], api_file: Path, notes: list[Path]) -> None:
    """Join what client, gateway and engines have written of each request."""
    tokenised_s = msgspec.msgpack.decode(api_file.read_bytes(), type=dict[str, float])
    engine: dict[str, Note] = {}
    for file in notes:
        engine |= msgspec.msgpack.decode(file.read_bytes(), type=dict[str, Note])
    for one, answers in zip(rounds, all_answers, strict=True):
        to_engine, from_engine, whole = [], [], []
        for answer in answers:
            name = f"{answer.answer_id}-0-0"  # the first choice of the first prompt
            note = engine[name]
            to_engine.append(note.came_s - tokenised_s[name])
            from_engine.append(answer.first_s - note.told_s)
            whole.append(answer.first_s - answer.sent_s - (note.told_s - note.came_s))
        one.to_engine_ms, one.from_engine_ms, one.whole_ms = _spread(to_engine), _spread(from_engine), _spread(whole)
        one.added_ms = _spread([there + back for there, back in zip(to_engine, from_engine, strict=True)])
        one.send_delay_ms = _spread([answer.sent_s - answer.due_s for answer in answers])


def _spread(values_s: list[float]) -> Spread:
    values = sorted(1e3 * value for value in values_s)
    return Spread(*(round(percentile(values, percent), 3) for percent in (50, 90, 99)))


def _medians(rounds: list[Round]) -> dict[str, float]:
    figures: dict[str, list[float]] = {}
    for one in rounds:
        for name, value in msgspec.to_builtins(one).items():
            parts = (
                {f"{name}_{part}": number for part, number in value.items()}
                if isinstance(value, dict)
                else {name: value}
            )
            for part, number in parts.items():
                figures.setdefault(part, []).append(number)
    return {name: round(statistics.median(values), 3) for name, values in figures.items()}


def _print(result: Result) -> None:
    medians = result.medians
    print(f"medians of {len(result.rounds)} rounds; {result.machine['cores']} cores, {medians['busy']:.0%} in use")
    print(f"{'ms':24}{'p50':>9}{'p90':>9}{'p99':>9}")
    for name in ("added", "to_engine", "from_engine", "whole", "bare", "send_delay"):
        print(f"{name:24}" + "".join(f"{medians[f'{name}_ms_{part}']:9.2f}" for part in ("p50", "p90", "p99")))
    print(f"{'CPU us':24}{'a token':>9}")
    print(f"{'fleet':24}{medians['fleet_us_per_token']:9.1f}\n{'frames':24}{medians['frames_us_per_token']:9.1f}")
    print(f"{'CPU us':24}{'a request':>9}, of {result.settings['tokens']} tokens")
    for name in ("api", "bare"):
        print(f"{name:24}{medians[f'{name}_cpu_us_per_request']:9.0f}")
    for name, most in (
        ("added_ms_p50", MOST_P50_MS),
        ("added_ms_p99", MOST_P99_MS),
        ("fleet_us_per_token", MOST_TOKEN_US),
    ):
        print(f"{name:24}{medians[name]:9.2f}, at most {most:g}: {'kept' if medians[name] <= most else 'NOT KEPT'}")


if __name__ == "__main__":
    main()
