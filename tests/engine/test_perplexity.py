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
    formats = [dtype for dtype in TOLERANCES if dtype != "int8" or library_or_none() is not None]
    with model_path(model) as source:
        for dtype in formats:
            tolerance = TOLERANCES[dtype]
            assert mean_nlls(load(source, dtype)) == pytest.approx(kept[dtype], abs=tolerance, rel=0), dtype


def test_weights_in_8_bits_cost_little() -> None:
    """The figures kept, which the test above holds the engine to."""
    kept = json.loads(baseline_path("smollm2").read_text())
    exact, rounded = (sum(kept[dtype]) / len(kept[dtype]) for dtype in ("float32", "int8"))
    assert math.exp(rounded - exact) < 1.015


def test_the_packaged_model_knows_the_text_and_random_ones_do_not() -> None:
    known = json.loads(baseline_path("smollm2").read_text())["float32"]
    assert len(known) == len(samples()) == 8
    assert max(known) < 4.5
    for model in MODELS[1:]:
        random = json.loads(baseline_path(model).read_text())["float32"]
        assert min(random) > max(known)
