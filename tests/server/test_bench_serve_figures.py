"""`headrace bench serve` without a server: figures from fixed records, streams from fixed bytes, workloads by seed."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from engine.errors import ConfigError
from server.bench.serve_client import base_url
from server.bench.serve_lengths import Lengths
from server.bench.serve_plot import in_flight, tokens_per_s
from server.bench.serve_records import RequestRecord, Slo, percentile, summarise
from server.bench.serve_stream import AnswerReader
from server.bench.serve_text import lines
from server.bench.serve_workload import ConversationSource, WordCalibration, Workload, arrivals

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
