"""What other servers tell of their load, in the texts of their metrics."""

from __future__ import annotations

import pytest

from engine.protocol import EngineLoad
from router.in_flight import STRANGER_TOKENS, TargetBooks
from server.foreign.load import KV_PARTS, MetricsReader, SlotsReader, block_size_of

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.4
vllm:cache_config_info{block_size="128",engine="0",num_gpu_blocks="5"} 1.0
"""
SGLANG = b'sglang:num_running_reqs{model_name="m"} 7\nsglang:num_queue_reqs{model_name="m"} 1\nsglang:token_usage 0.5\n'
LLAMA = b"llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\n"


@pytest.mark.parametrize(
    ("text", "running", "waiting", "usage"),
    [(VLLM, 5, 4, 0.3), (SGLANG, 7, 1, 0.5), (LLAMA, 1, 2, None)],
    ids=["vllm", "sglang", "llama"],
)
def test_metrics_are_read(text: bytes, running: int, waiting: int, usage: float | None) -> None:
    load = MetricsReader().read(text)
    assert load is not None
    assert (load.running, load.waiting) == (running, waiting)
    assert (load.kv_blocks_used, load.kv_blocks_total) == ((0, 0) if usage is None else (usage * KV_PARTS, KV_PARTS))


@pytest.mark.parametrize("text", [b"", b"up 1\n", b"\xff\xfe", b"vllm:num_requests_running NaN\n", b"<html>"])
def test_what_tells_no_load_is_none(text: bytes) -> None:
    assert MetricsReader().read(text) is None
    assert SlotsReader().read(text) is None


def test_slots_are_counted() -> None:
    assert SlotsReader().read(b'[{"id":0,"is_processing":true},{"id":1,"is_processing":false}]') == EngineLoad(
        running=1
    )


def test_the_size_of_blocks_is_told_by_vllm() -> None:
    assert block_size_of(VLLM) == 128
    assert block_size_of(SGLANG) is None


def test_counts_of_requests_stand_beside_the_claims() -> None:
    books = TargetBooks()
    books.begin(("", 1), 1000, 800, 0.0)
    books.begin(("", 2), 3000, 3000, 0.0)
    books.answer(("", 1))
    books.report(EngineLoad(running=2, waiting=0, kv_blocks_used=1, kv_blocks_total=4), 1.0, tells_tokens=False)
    assert books.view(500, 64, 1.0) == (3000, 1000, 0.25), "nobody is there that is not claimed"
    books.report(EngineLoad(running=3, waiting=2), 1.1, tells_tokens=False)
    assert books.view(500, 64, 1.1) == (3000 + 2 * 2000, 1000 + 2000, 0.0), "three strangers are like the claims"
    assert books.queued_uncached_tokens(1.1) == 7000
    assert books.drift(1.1) == 3
    books.end(("", 1))
    books.end(("", 2))
    assert books.view(500, 64, 1.2) == (4000, 2000, 0.0), "an end is no news of strangers"
    books.report(EngineLoad(running=1), 1.3, tells_tokens=False)
    assert books.view(0, 64, 1.3) == (0, STRANGER_TOKENS, 0.0)
    assert books.view(0, 64, 9.0) == (0, 0, 0.0), "an old report is not believed"
    books.check_integrity()
