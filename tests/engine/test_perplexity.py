"""The likelihood of a fixed text, per model and dtype, stays what it was (benchmarks/perplexity.py has the figures)."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.perplexity import MODELS, TOLERANCES, baseline_path, load, mean_nlls, model_path, samples
from engine.cpu_ops.library import library_or_none


@pytest.mark.parametrize("model", MODELS)
def test_every_sample_is_as_likely_as_it_was(model: str) -> None:
    kept = json.loads(baseline_path(model).read_text())
    assert kept.keys() == TOLERANCES.keys()
    # Products of fp8 are slow on a CPU: the packaged model has a test of its own.
    left_out = {"int8"} if library_or_none() is None else set()
    left_out |= {"fp8"} if model == "smollm2" else set()
    with model_path(model) as source:
        for dtype in TOLERANCES.keys() - left_out:
            check(source, dtype, kept)


@pytest.mark.soak
def test_the_packaged_model_in_fp8_is_as_good_as_it_was() -> None:
    check("smollm2", "fp8", json.loads(baseline_path("smollm2").read_text()))


def check(source: str, dtype: str, kept: dict[str, list[float]]) -> None:
    assert mean_nlls(load(source, dtype)) == pytest.approx(kept[dtype], abs=TOLERANCES[dtype], rel=0), dtype


@pytest.mark.parametrize(("dtype", "factor"), [("int8", 1.015), ("fp8", 1.04)])
def test_weights_in_8_bits_cost_little(dtype: str, factor: float) -> None:
    """The figures kept, which the tests above hold the engine to."""
    kept = json.loads(baseline_path("smollm2").read_text())
    exact, rounded = (sum(kept[one]) / len(kept[one]) for one in ("float32", dtype))
    assert math.exp(rounded - exact) < factor


def test_the_packaged_model_knows_the_text_and_random_ones_do_not() -> None:
    known = json.loads(baseline_path("smollm2").read_text())["float32"]
    assert len(known) == len(samples()) == 8
    assert max(known) < 4.5
    for model in MODELS[1:]:
        random = json.loads(baseline_path(model).read_text())["float32"]
        assert min(random) > max(known)
