"""`headrace bench serve`: figures from fixed records, streams from fixed bytes, and loads against real HTTP servers."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from engine.errors import ConfigError
from engine.protocol import GenerateRequest
from server.bench.serve_client import RequestOptions, base_url
from server.bench.serve_errors import BenchError
from server.bench.serve_lengths import Lengths
from server.bench.serve_load import Load
from server.bench.serve_plot import in_flight, tokens_per_s
from server.bench.serve_records import RequestRecord, Slo, percentile, summarise
from server.bench.serve_run import ServeBench, ServeResult, measure, plotter, write_result
from server.bench.serve_stream import AnswerReader
from server.bench.serve_text import lines
from server.bench.serve_workload import ConversationSource, WordCalibration, Workload, arrivals
from server.cli.main import run
from tests.support.api_server import serving
from tests.support.fake_engine import FakeEngine, Gate
from tests.support.tiny_text import byte_ids

FIXED = Lengths("fixed", 40)


def record(due: float = 0.0, sent: float = 0.0, end: float = 0.0, **more: object) -> RequestRecord:
    fields = {"conversation": 0, "turn": 0, "scheduled_s": due, "sent_s": sent, "end_s": end, **more}
    return msgspec.convert(fields, RequestRecord)


# Pure: records to figures.


def test_latencies_count_from_the_due_time_and_not_from_the_sending() -> None:
    late = record(due=1.0, sent=3.0, end=7.0, text_s=[4.0, 5.0, 6.0], completion_tokens=5)
    assert (late.ttft_s, late.e2e_s, late.tpot_s, late.gaps_s) == (3.0, 6.0, 0.5, [1.0, 1.0])


def test_without_usage_a_chunk_is_a_token() -> None:
    assert record(text_s=[1.0, 2.0, 4.0]).output_tokens == 3
    assert record(text_s=[1.0, 2.0, 4.0]).tpot_s == 1.5


def test_an_answer_without_text_has_its_first_token_at_its_end() -> None:
    silent = record(due=1.0, end=3.0, completion_tokens=1)
    assert (silent.ttft_s, silent.tpot_s, silent.gaps_s) == (2.0, None, [])


def test_percentiles_interpolate() -> None:
    values = [10.0, 20.0, 30.0, 40.0, 50.0]
    assert [percentile(values, one) for one in (0, 50, 90, 100)] == [10, 30, 46, 50]
    assert percentile([7.0], 99) == 7


def test_a_summary_of_known_records() -> None:
    records = [
        record(due=0.0, sent=0.0, end=2.0, text_s=[1.0, 2.0], prompt_tokens=10, cached_tokens=4, completion_tokens=2),
        record(due=1.0, sent=1.5, end=4.0, text_s=[2.0, 4.0], prompt_tokens=20, cached_tokens=0, completion_tokens=3),
        record(due=2.0, sent=2.0, end=5.0, text_s=[3.0], error="cut stream", message="first"),
        record(due=2.0, sent=2.0, end=2.5, error="http 429", message="slow down"),
        record(due=2.0, sent=2.0, end=2.5, error="cut stream", message="second"),
    ]
    summary = summarise(records, Slo(ttft_s=1.0, tpot_s=0.99))
    assert (summary.requests, summary.completed, summary.failed, summary.elapsed_s) == (5, 2, 3, 5.0)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (30, 4, 5)
    assert (summary.requests_per_s, summary.output_tokens_per_s, summary.total_tokens_per_s) == (0.4, 1.0, 7.0)
    assert summary.output_tokens_counted_by == "usage"
    assert summary.ttft_ms is not None
    assert (summary.ttft_ms.p50, summary.ttft_ms.max, summary.ttft_ms.count) == (1000, 1000, 2)
    assert summary.tpot_ms is not None
    assert (summary.tpot_ms.p50, summary.tpot_ms.p90) == (1000, 1000)
    assert summary.itl_ms is not None
    assert (summary.itl_ms.mean, summary.itl_ms.p90, summary.itl_ms.count) == (1500, 1900, 2)
    assert summary.e2e_ms is not None
    assert (summary.e2e_ms.p50, summary.e2e_ms.p99) == (2500, 2990)
    assert summary.send_delay_ms is not None
    assert summary.send_delay_ms.max == 500
    assert {kind: (one.count, one.first_message) for kind, one in summary.errors.items()} == {
        "cut stream": (2, "first"),
        "http 429": (1, "slow down"),
    }
    assert summary.goodput is not None
    assert summary.goodput.good == 0
    assert any("2 x cut stream: first" in line for line in lines(summary))


def test_goodput_counts_failures_as_misses() -> None:
    records = [
        record(end=2.0, text_s=[0.5, 0.7], completion_tokens=2),
        record(end=2.0, text_s=[0.5, 0.9], completion_tokens=2),
        record(end=2.0, text_s=[1.5, 1.7], completion_tokens=2),
        record(end=2.0, text_s=[0.5], error="timeout"),
    ]
    goodput = summarise(records, Slo(ttft_s=1.0, tpot_s=0.3)).goodput
    assert goodput is not None
    assert (goodput.good, goodput.share, goodput.requests_per_s) == (1, 0.25, 0.5)


def test_a_missing_count_makes_the_sum_unknown_and_not_smaller() -> None:
    summary = summarise([record(end=1.0, prompt_tokens=5, completion_tokens=1), record(end=1.0, text_s=[1.0])])
    assert (summary.prompt_tokens, summary.total_tokens_per_s, summary.output_tokens) == (None, None, 2)
    assert summary.output_tokens_counted_by == "usage and chunks"


def test_a_summary_without_a_single_answer() -> None:
    summary = summarise([record(end=0.0, error="connection", message="refused")])
    assert (summary.ttft_ms, summary.requests_per_s, summary.completed) == (None, 0.0, 0)
    assert list(lines(summary))


def test_the_picture_counts_every_token_once_and_ends_with_nothing_in_flight() -> None:
    records = [
        record(sent=0.0, end=2.0, text_s=[0.5, 2.0], completion_tokens=6),
        record(sent=1.0, end=1.5, text_s=[1.2]),
    ]
    assert sum(tokens_per_s(records, 0.5, 4)) * 0.5 == pytest.approx(7)
    assert in_flight(records) == ([0.0, 1.0, 1.5, 2.0], [1, 2, 1, 0])


# Pure: bytes to records.


def fed(*parts: bytes) -> tuple[RequestRecord, str]:
    """A part arrives every second; the body ends a second after the last."""
    seen = record()
    reader = AnswerReader(seen)
    for at, part in enumerate(parts, 1):
        reader.feed(part, float(at))
    reader.end(len(parts) + 1.0)
    return seen, reader.text


def test_a_chat_stream_that_is_cut_anywhere() -> None:
    whole = (
        b': keep-alive\n\ndata: {"choices":[{"delta":{"role":"assistant","content":""}}]}\r\n\r\n'
        b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata:{"choices":[{"delta":{"content":"b"}}]}\n\n'
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"usage":null,"error":null}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,'
        b'"prompt_tokens_details":{"cached_tokens":2}}}\n\ndata: [DONE]\n\n'
    )
    for at in range(1, len(whole) - 1):
        seen, text = fed(whole[:at], whole[at:])
        assert text == "ab"
        assert (seen.prompt_tokens, seen.completion_tokens, seen.cached_tokens) == (7, 3, 2)
        assert (seen.finish_reason, seen.error, seen.end_s, len(seen.text_s)) == ("stop", None, 2.0, 2)


def test_arrivals_are_those_of_the_chunks_with_text() -> None:
    text, end = b'data: {"choices":[{"text":"x"}]}\n', b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n'
    seen, _ = fed(b'data: {"choices":[{"text":""}]}\n', text, text + text, end)
    assert (seen.text_s, seen.end_s, seen.error, seen.output_tokens) == ([2.0, 3.0, 3.0], 5.0, None, 3)


def test_reasoning_counts_and_is_no_part_of_the_answer() -> None:
    seen, text = fed(b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\ndata: [DONE]\n')
    assert (seen.text_s, text) == ([1.0], "")


def test_a_stream_without_its_end_is_cut() -> None:
    seen, _ = fed(b'data: {"choices":[{"text":"x"}]}\n')
    assert (seen.error, seen.end_s) == ("cut stream", 2.0)


def test_an_error_event_ends_the_answer() -> None:
    seen, _ = fed(b'data: {"error":{"message":"it\\ndied"}}\n', b'data: {"choices":[{"text":"x"}]}\ndata: [DONE]\n')
    assert (seen.error, seen.message, seen.end_s, seen.text_s) == ("error event", "it died", 1.0, [])


# Pure: workloads.


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("512", Lengths("fixed", 512)),
        ("fixed:1", Lengths("fixed", 1)),
        ("uniform:3:9", Lengths("uniform", 3, 9)),
        ("lognormal:300:0.8", Lengths("lognormal", 300, None, 0.8)),
        ("lognormal:300:0.8:900", Lengths("lognormal", 300, 900, 0.8)),
    ],
)
def test_distributions_are_written_as_a_word(text: str, lengths: Lengths) -> None:
    assert Lengths.parse(text) == lengths


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "x", "1.5", "uniform:9:3", "uniform:3", "fixed:1:2", "lognormal:9:nan", "normal:1:2"]
)
def test_what_is_no_distribution_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no distribution of lengths"):
        Lengths.parse(text)


def test_drawn_lengths_have_their_bounds_and_their_median() -> None:
    draw = random.Random(1)
    assert {Lengths.parse("uniform:3:5").draw(draw) for _ in range(200)} == {3, 4, 5}
    long_tail = sorted(Lengths.parse("lognormal:300:0.8:900").draw(draw) for _ in range(2001))
    assert 270 < long_tail[1000] < 330
    assert long_tail[-1] == 900
    assert long_tail[0] >= 1


def test_conversations_follow_from_the_seed_and_their_number() -> None:
    workload = Workload(prompt=Lengths("uniform", 5, 50), output=FIXED, turns=2, shared_prefix_tokens=9, seed=3)
    one, other = (ConversationSource(workload, WordCalibration()) for _ in range(2))
    backwards = [other.conversation(index) for index in reversed(range(5))]
    assert [one.conversation(index) for index in range(5)] == backwards[::-1]
    warm = ConversationSource(workload, WordCalibration(), warm_up=True).conversation(0)
    reseeded = ConversationSource(msgspec.structs.replace(workload, seed=4), WordCalibration()).conversation(0)
    texts = [conversation.turns[0].text for conversation in (one.conversation(0), one.conversation(1), warm)]
    first_words = {tuple(text.split()[:9]) for text in texts}
    assert len(first_words) == 1
    assert len({*texts, reseeded.turns[0].text}) == 4
    assert tuple(reseeded.turns[0].text.split()[:9]) not in first_words


def test_prefixes_are_shared_among_as_many_groups_as_asked_for() -> None:
    workload = Workload(prompt=FIXED, output=FIXED, shared_prefix_tokens=20, shared_prefixes=3, token_ids=(10, 99))
    source = ConversationSource(workload, WordCalibration())
    prompts = [source.conversation(index).turns[0].ids or [] for index in range(60)]
    assert len({tuple(ids[:20]) for ids in prompts}) == 3
    assert len({tuple(ids[20:]) for ids in prompts}) == 60
    assert all(len(ids) == 60 and all(10 <= token < 99 for token in ids) for ids in prompts)


def test_calibration_is_the_line_through_two_probes() -> None:
    calibration = WordCalibration.between((10, 110), (45, 245))
    assert (calibration.tokens_per_word, calibration.overhead) == (2.0, 25.0)
    assert (calibration.words(125), calibration.words(125, opens=False), calibration.words(3)) == (50, 62, 1)
    assert WordCalibration.between((10, 110), (5, 5)) == WordCalibration()


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    times = list(itertools.islice(arrivals(4.0, 7), 4001))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert times[0] == 0
    assert mean == pytest.approx(0.25, rel=0.1)
    assert spread == pytest.approx(0.25**2, rel=0.2)
    assert times == list(itertools.islice(arrivals(4.0, 7), 4001))


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("127.0.0.1:80", "http://127.0.0.1:80/v1"),
        ("http://a/", "http://a/v1"),
        ("https://a/v1", "https://a/v1"),
        ("https://a/x/v1beta/", "https://a/x/v1beta"),
        ("https://a/x", "https://a/x/v1"),
    ],
)
def test_a_base_url_is_completed(url: str, base: str) -> None:
    assert base_url(url) == base


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:x", "http://a?b=1", "http://me:secret@a"])
def test_what_is_no_base_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        base_url(url)
    assert "secret" not in str(refusal.value)


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
        result = await measure(msgspec.structs.replace(bench, timeout_s=0.3))
    assert [one.error for one in result.requests] == ["timeout", "timeout"]
    assert all(len(one.text_s) == 1 for one in result.requests)


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


def test_a_picture_without_matplotlib_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "server.bench.serve_plot")
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["bench", "serve", "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install 'headrace[bench]'" in capsys.readouterr().err
