"""`headrace bench serve` against real HTTP servers: ours, and another kind with its faults; files and mistakes."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from engine.protocol import GenerateRequest
from server.bench.serve_client import RequestOptions
from server.bench.serve_errors import BenchError
from server.bench.serve_lengths import Lengths
from server.bench.serve_load import Load
from server.bench.serve_records import Slo, summarise
from server.bench.serve_run import ServeBench, ServeResult, measure, plotter, write_result
from server.bench.serve_workload import Workload, arrivals
from server.cli.main import run
from tests.support.api_server import serving
from tests.support.fake_engine import FakeEngine, Gate
from tests.support.tiny_text import byte_ids

FIXED = Lengths("fixed", 40)

# Loads against a server of ours.


def bench_of(url: str, **changes: object) -> ServeBench:
    bench = ServeBench(
        url=url,
        options=RequestOptions(),
        workload=Workload(prompt=Lengths("fixed", 200), output=Lengths("uniform", 2, 9)),
        load=Load(concurrency=3, requests=10),
        warm_up=2,
        timeout_s=30,
    )
    return msgspec.structs.replace(bench, **changes)


def wordy_engine() -> FakeEngine:
    """Answers with as many letters, a token each, as it may."""
    engine = FakeEngine(max_model_len=4096)
    engine.reply = lambda request: byte_ids(b"x" * (request.sampling.max_tokens or 1))
    return engine


def measured(engine: FakeEngine) -> list[GenerateRequest]:
    """What came after two probes and two requests of the warm-up."""
    return engine.seen[4:]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_every_token_is_counted(endpoint: str) -> None:
    engine = wordy_engine()
    async with serving(engine) as server:
        bench = bench_of(server.url, options=msgspec.convert({"endpoint": endpoint}, RequestOptions))
        result = await measure(bench)
    asked = measured(engine)
    assert len(asked) == 10
    summary = result.summary
    assert (summary.requests, summary.completed, summary.failed) == (10, 10, 0)
    assert summary.output_tokens == sum(one.sampling.max_tokens or 0 for one in asked)
    assert summary.prompt_tokens == sum(len(one.prompt_ids) for one in asked)
    assert summary.output_tokens_counted_by == "usage"
    # Words are of one to eight letters, and a byte is a token: lengths scatter around what was asked for.
    assert all(140 < len(one.prompt_ids) < 260 for one in asked)
    assert all(record.completion_tokens == record.max_tokens for record in result.requests)
    assert all(len(record.text_s) == record.max_tokens for record in result.requests)
    for record in result.requests:
        assert record.scheduled_s <= record.sent_s <= record.text_s[0]
        assert record.text_s == sorted(record.text_s)
        assert record.text_s[-1] <= record.end_s
    # The summary is a function of the records in the file.
    assert summarise(result.requests) == summary
    assert result.settings.options.model == "tiny"


async def test_a_second_run_asks_the_same() -> None:
    asked: list[list[tuple[int, ...]]] = []
    for concurrency in (1, 4):
        engine = wordy_engine()
        async with serving(engine) as server:
            await measure(bench_of(server.url, load=Load(concurrency=concurrency, requests=6)))
        asked.append(sorted(tuple(one.prompt_ids) for one in measured(engine)))
    assert asked[0] == asked[1]
    assert len(set(asked[0])) == 6


async def test_no_more_are_in_flight_than_the_concurrency() -> None:
    engine = wordy_engine()
    most = 0
    reply = engine.reply

    def watched(request: GenerateRequest) -> list[int]:
        nonlocal most
        most = max(most, len(engine.running))
        return reply(request)

    engine.reply = watched
    async with serving(engine) as server:
        await measure(bench_of(server.url, load=Load(concurrency=3, requests=12)))
    assert 1 <= most <= 3


async def test_a_rate_sends_what_is_due_while_no_answer_comes() -> None:
    """Every stream is held at its second token until all were sent: a client that waits for answers never ends."""
    engine = wordy_engine()
    async with serving(engine) as server:
        bench = bench_of(server.url, load=Load(rate=200.0, requests=20), warm_up=0)
        bench = msgspec.structs.replace(bench, workload=Workload(prompt=FIXED, output=Lengths("fixed", 3), seed=5))
        engine.gate = Gate(after=1)
        task = asyncio.create_task(measure(bench))
        await engine.until(lambda: len(engine.running) == 20)
        engine.gate.opened.set()
        result = await task
    assert result.summary.completed == 20
    due = list(itertools.islice(arrivals(200.0, 5), 20))
    by_number = sorted(result.requests, key=lambda one: one.conversation)
    assert [one.scheduled_s for one in by_number] == due
    assert all(one.sent_s >= one.scheduled_s for one in by_number)


async def test_turns_carry_what_was_said() -> None:
    engine = wordy_engine()
    async with serving(engine) as server:
        workload = Workload(prompt=FIXED, output=Lengths("fixed", 4), turns=3, shared_prefix_tokens=30)
        bench = bench_of(server.url, workload=workload, load=Load(concurrency=1, requests=5), warm_up=0)
        result = await measure(bench)
    assert [(one.conversation, one.turn) for one in result.requests] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    prompts = ["".join(engine.codec.decode(one.prompt_ids)) for one in engine.seen[2:]]
    assert "xxxx" not in prompts[0]
    assert [prompt.count("xxxx") for prompt in prompts] == [0, 1, 2, 0, 1]


async def test_token_ids_arrive_as_they_are() -> None:
    engine = wordy_engine()
    async with serving(engine) as server:
        workload = Workload(prompt=FIXED, output=Lengths("fixed", 2), token_ids=(5, 60))
        options = RequestOptions(endpoint="completions")
        result = await measure(bench_of(server.url, workload=workload, options=options))
    asked = engine.seen[2:]
    assert len(asked) == 10
    assert all(len(one.prompt_ids) == 40 and all(5 <= token < 60 for token in one.prompt_ids) for one in asked)
    assert result.calibration is None


async def test_a_duration_ends_an_endless_load() -> None:
    engine = wordy_engine()
    async with serving(engine) as server:
        result = await measure(bench_of(server.url, load=Load(rate=100.0, duration_s=0.2)))
    due = list(itertools.takewhile(lambda at: at < 0.2, arrivals(100.0, 0)))
    assert len(result.requests) == len(due) > 1


async def test_a_server_that_refuses_everything_is_told_at_once() -> None:
    async with serving(FakeEngine()) as server:
        options = RequestOptions(model="another")
        with pytest.raises(BenchError, match="404"):
            await measure(bench_of(server.url, options=options))


async def test_no_server_is_told_in_a_line(unused_tcp_port: int) -> None:
    with pytest.raises(BenchError, match="No server answers"):
        await measure(bench_of(f"http://127.0.0.1:{unused_tcp_port}"))


# Loads against a server of another kind, faults included.

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def foreign(answer: Answer, usage: dict[str, int] | None) -> AsyncIterator[str]:
    """A chat server without /models. Whole answers, which probes ask for, have the usage given."""

    async def chat(request: web.Request) -> web.StreamResponse:
        if (await request.json())["stream"]:
            return await answer(request)
        return web.json_response({"choices": [{"message": {"content": "x"}}], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    finally:
        await runner.cleanup()


async def stream_of(request: web.Request, *events: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(f"data: {event}\n\n".encode())
    return response


PIECE = '{"choices":[{"delta":{"content":"x"}}]}'
FINISH = '{"choices":[{"delta":{},"finish_reason":"stop"}]}'


async def test_a_server_without_usage_and_without_done_is_counted_by_chunks() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await stream_of(request, PIECE, PIECE, PIECE, FINISH)

    said: list[str] = []
    async with foreign(answer, None) as url:
        result = await measure(bench_of(url, options=RequestOptions(model="m", usage=False)), say=said.append)
    assert (result.summary.completed, result.summary.output_tokens) == (10, 30)
    assert (result.summary.output_tokens_counted_by, result.summary.prompt_tokens) == ("chunks", None)
    assert len(said) == 1
    assert "word is taken for a token" in said[0]


async def test_every_kind_of_failure_is_counted_and_the_load_goes_on() -> None:
    seen = itertools.count()

    async def answer(request: web.Request) -> web.StreamResponse:
        match next(seen) % 5:
            case 0:
                return await stream_of(request, PIECE, FINISH, "[DONE]")
            case 1:
                return web.json_response({"error": {"message": "slow down"}}, status=429)
            case 2:
                return await stream_of(request, PIECE, '{"error":{"message":"it died"}}')
            case 3:
                return await stream_of(request, PIECE)
            case _:
                return await stream_of(request, PIECE, "{nonsense")

    async with foreign(answer, {"prompt_tokens": 9}) as url:
        bench = bench_of(url, options=RequestOptions(model="m"), load=Load(concurrency=1, requests=15), warm_up=0)
        result = await measure(bench)
    kinds = Counter(one.error for one in result.requests)
    assert kinds == {None: 3, "http 429": 3, "error event": 3, "cut stream": 3, "malformed": 3}
    assert result.summary.errors["http 429"].first_message == "slow down"
    assert result.summary.output_tokens == 3


async def test_an_answer_that_does_not_end_is_a_timeout() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = await stream_of(request, PIECE)
        await asyncio.Event().wait()
        return response

    async with foreign(answer, None) as url:
        bench = bench_of(url, options=RequestOptions(model="m"), load=Load(concurrency=2, requests=2), warm_up=0)
        result = await measure(msgspec.structs.replace(bench, timeout_s=2.0))
    assert [one.error for one in result.requests] == ["timeout", "timeout"]


async def test_a_connection_is_used_again() -> None:
    peers: set[object] = set()

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return await stream_of(request, PIECE, FINISH, "[DONE]")

    async with foreign(answer, None) as url:
        bench = bench_of(url, options=RequestOptions(model="m"), load=Load(concurrency=1, requests=8), warm_up=0)
        assert (await measure(bench)).summary.completed == 8
    assert len(peers) == 1


# Files and the command line.


async def test_result_and_picture_are_written(tmp_path: Path) -> None:
    async with serving(wordy_engine()) as server:
        result = await measure(bench_of(server.url, slo=Slo(ttft_s=60.0)), "sk-secret")
    write_result(result, tmp_path / "result.json")
    written = (tmp_path / "result.json").read_bytes()
    assert b"sk-secret" not in written
    assert msgspec.json.decode(written, type=ServeResult) == result
    plotter()(result).savefig(tmp_path / "result.png")
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG\r\n")


async def test_an_interrupt_writes_what_was_measured(tmp_path: Path) -> None:
    """The sixth request of the load gets no answer; then comes Ctrl-C."""
    engine, probes, answered = wordy_engine(), 2, 5
    reply = engine.reply

    def hold_the_last(request: GenerateRequest) -> list[int]:
        if len(engine.seen) > probes + answered:
            engine.gate = Gate(after=0)
        return reply(request)

    engine.reply = hold_the_last
    out = tmp_path / "out.json"
    async with serving(engine) as server:
        arguments = ["--url", server.url, "--concurrency", "1", "--requests", "50", "--warm-up", "0"]
        arguments += ["--output-tokens", "4", "--prompt-tokens", "40", "--out", str(out)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "server", "bench", "serve", *arguments, stdout=asyncio.subprocess.PIPE
        )
        try:
            await engine.until(lambda: engine.gate is not None and len(engine.running) == 1)
            process.send_signal(signal.SIGINT)
            printed, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert engine.gate is not None
        engine.gate.opened.set()
    assert process.returncode == 130
    assert f"these are the {answered} requests" in printed.decode()
    result = msgspec.json.decode(out.read_bytes(), type=ServeResult)
    assert result.interrupted
    assert len(result.requests) == result.summary.completed == answered


async def test_an_interrupt_before_any_answer_is_nothing_but_an_end() -> None:
    engine = wordy_engine()
    async with serving(engine) as server:
        engine.gate = Gate(after=0)
        bench = bench_of(server.url, warm_up=0, workload=Workload(prompt=FIXED, output=FIXED, token_ids=(5, 50)))
        completions = msgspec.convert({"endpoint": "completions"}, RequestOptions)
        task = asyncio.create_task(measure(msgspec.structs.replace(bench, options=completions)))
        await engine.until(lambda: len(engine.running) == 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.gate.opened.set()


async def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    async with serving(wordy_engine()) as server:
        arguments = ["bench", "serve", "--url", server.url, "--requests", "4", "--concurrency", "2", "--out", str(out)]
        arguments += ["--prompt-tokens", "uniform:100:200", "--output-tokens", "3", "--slo-ttft", "60000"]
        assert await asyncio.to_thread(run, arguments) == 0
    shown = capsys.readouterr().out
    assert "4 completed, 0 failed" in shown
    assert "12 output (by usage)" in shown
    assert "100.0% of requests within the SLO" in shown
    assert msgspec.json.decode(out.read_bytes(), type=ServeResult).settings.slo == Slo(ttft_s=60.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "2", "--rate", "1"], "either --concurrency or --rate"),
        (["--prompt-tokens", "many"], "--prompt-tokens: 'many' is no distribution"),
        (["--token-ids", "9:3"], "no range of ids"),
        (["--token-ids", "--endpoint", "chat"], "prompts of text completions"),
        (["--token-ids", "--turns", "2"], "do not go together"),
        (["--extra-body", "[1]"], "not a JSON object"),
        (["--out", "/does/not/exist/x.json"], "no folder"),
        (["--url", "ftp://x"], "not the URL of a server"),
    ],
)
def test_mistakes_are_told_before_anything_is_sent(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "serve", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "importers", "arguments"),
    [
        ("matplotlib", ["serve_plot"], ["--plot", "x.png"]),
        ("aiohttp", ["serve_client", "serve_load", "serve_run"], []),
    ],
)
def test_without_the_extra_the_command_that_installs_it_is_named(
    missing: str,
    importers: list[str],
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in list(sys.modules):
        if name.startswith(f"{missing}.") or name.removeprefix("server.bench.") in importers:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert run(["bench", "serve", *arguments]) == 2
    told = capsys.readouterr().err
    assert f"needs {missing}, which is not installed" in told
    assert "pip install 'headrace[bench]'" in told
