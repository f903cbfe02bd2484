"""`headrace bench engine`: the whole of it on a CPU with a tiny model, and the arithmetic of its figures."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from engine.config import EngineConfig
from engine.loader.random_shapes import SHAPES
from server.bench.drivers import Arrivals, Timeline
from server.bench.engine import TRIAL, Record, decode_intervals_s, run
from server.bench.floors import Ceilings, ModelCosts
from server.bench.workloads import again, decode, prefill, shared

H200 = Ceilings(device="NVIDIA H200", torch_version="2.11", copy_tb_s=4.3, matmul_tflop_s=790)


def test_a_trial_measures_every_figure_in_both_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(
        model="random:tiny", device="cpu", threads=1, max_running=16, max_model_len=1024, kv_cache_memory_bytes=16 << 20
    )
    out = tmp_path / "record.json"
    run("tiny", config, TRIAL, ("process", "in-process"), out)
    record = msgspec.json.decode(out.read_bytes(), type=Record)
    names = ["start", "decode 1 x 24", "decode 3 x 24", "prefill 1 x 40", "prefill 3 x 20", "cached 1 x 200"]
    names.append("shared T=0.6")
    for where in ("process", "in-process"):
        figures = {figure.name: figure for figure in record.figures if figure.where == where}
        assert list(figures) == names
        assert all(figure.value > 0 for figure in figures.values())
        # A whole hit computes its last token again, inside the last full block.
        assert figures["cached 1 x 200"].more["cached_tokens"] == 192
    printed = capsys.readouterr().out
    assert all(printed.count(name) == 2 for name in names)


def test_the_shared_bench_has_the_tokens_that_others_report() -> None:
    workload = shared(0.6, vocab=151936)
    assert (workload.prompt_tokens, workload.output_tokens) == (142_827, 133_966)
    shifted = shared(0.6, vocab=151936, shift=3)
    assert [request.prompt_ids[0] for request in shifted.requests] == [
        request.prompt_ids[0] + 3 for request in workload.requests
    ]


def test_workloads_have_the_lengths_they_are_named_for_and_new_ids_when_run_again() -> None:
    workload = decode(random.Random(0), vocab=50, batch=3, context=20, outputs=7)
    assert [len(request.prompt_ids) for request in workload.requests] == [20, 20, 20]
    assert {request.sampling.max_tokens for request in workload.requests} == {7}
    ids = {request.request_id for one in (workload, again(workload, 0)) for request in one.requests}
    assert len(ids) == 6
    assert prefill(random.Random(0), vocab=50, count=2, length=9).output_tokens == 2


def test_floors_are_bytes_over_bandwidth_and_operations_over_the_matrix_rate() -> None:
    llama = ModelCosts.of(SHAPES["llama-3.1-8b"])
    assert llama.kv_bytes_per_token == 131_072
    assert 2 * (llama.layer_parameters + llama.head_parameters) == pytest.approx(15.0e9, rel=0.01)
    small = ModelCosts.of(SHAPES["llama-3.1-8b"], layer_weight_bytes=1)
    assert small.weight_bytes == llama.layer_parameters + 2 * llama.head_parameters
    assert llama.decode_step_s(1, 1088, H200) == pytest.approx(3.52e-3, rel=0.01)
    assert llama.decode_step_s(256, 1088, H200) == pytest.approx(11.98e-3, rel=0.01)
    # A batch so large that the products take longer than the reading.
    assert llama.decode_step_s(4096, 1, H200) == pytest.approx(4096 * 15.0e9 / 790e12, rel=0.02)
    assert llama.prefill_s([8192], H200) == pytest.approx(8192 / 49_000, rel=0.02)
    workload = shared(0.6, vocab=128256)
    assert llama.workload_s(workload, H200) == pytest.approx(9.8, rel=0.05)


def test_step_times_are_taken_while_all_requests_decode() -> None:
    early = Arrivals(times_s=[0.0, *(1.0 + step for step in range(20))], tokens=[1] * 21)
    # Begins late; one of its outputs brings two tokens.
    late = Arrivals(times_s=[5.0, *(5.5 + step for step in range(30))], tokens=[1] * 11 + [2] + [1] * 19)
    intervals = decode_intervals_s(Timeline(0.0, 40.0, [early, late], steps=0))
    assert len(intervals) == 11
    assert sorted(set(intervals)) == [0.5, 1.0]
