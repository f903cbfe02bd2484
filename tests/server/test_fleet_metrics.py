"""The metrics of targets, as they stand in the exposition."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from engine.protocol import CachedTokens
from router.values import Hit, Query
from server.config import RoutingConfig
from server.fleet.metrics import TargetsCollector
from server.fleet.model_pool import ModelPool
from server.fleet.router_metrics import RouterMetrics
from server.fleet.target_metrics import TargetMetrics
from server.metrics import ServerMetrics
from tests.support import routing_process
from tests.support.routing_process import break_target

ROOT = Path(__file__).parents[2]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@contextmanager
def model_pool() -> Iterator[ModelPool]:
    """A pool without engines: its targets are the test's."""
    with zmq.Context() as context:
        yield ModelPool("tiny", RoutingConfig(policy="round_robin"), context=context)


def of_targets(registry: CollectorRegistry, name: str) -> dict[str, float]:
    return {
        sample.labels["target"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_targets_of_several_models_are_one_family() -> None:
    ready, in_flight, drift = {"w/0": True, "w/1": False}, {"w/0": 3, "w/1": 0}, {"w/1": -2}
    first = TargetsCollector("a", lambda: ready, lambda: in_flight, lambda: drift)
    second = TargetsCollector("b", lambda: {"v/0": True}, lambda: {"v/0": 1}, dict)
    text = ServerMetrics().scrape(None, [first, second]).decode()
    assert text.count("# TYPE headrace_target_ready gauge") == 1
    assert text.count("# TYPE headrace_target_in_flight gauge") == 1
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("headrace_target_"))
    assert samples == {
        'headrace_target_ready{model="a",target="w/0"}': "1.0",
        'headrace_target_ready{model="a",target="w/1"}': "0.0",
        'headrace_target_ready{model="b",target="v/0"}': "1.0",
        'headrace_target_in_flight{model="a",target="w/0"}': "3.0",
        'headrace_target_in_flight{model="a",target="w/1"}': "0.0",
        'headrace_target_in_flight{model="b",target="v/0"}': "1.0",
        'headrace_target_drift{model="a",target="w/1"}': "-2.0",
    }


def test_breakers_are_told_by_target_and_trips_survive_it(registry: CollectorRegistry) -> None:
    with model_pool() as pool:
        metrics, dispatcher = TargetMetrics(registry), pool.pool.dispatcher
        for target in ("a/0", "b/0"):
            dispatcher.add_target(target)
        break_target(dispatcher, "a/0")
        metrics.update("tiny", pool)
        assert of_targets(registry, "headrace_target_breaker_state") == {"a/0": 2, "b/0": 0}
        assert of_targets(registry, "headrace_target_breaker_trips_total") == {"a/0": 1}
        dispatcher.renew_target("a/0")
        break_target(dispatcher, "a/0")
        dispatcher.remove_target("a/0")
        metrics.update("tiny", pool)
        assert of_targets(registry, "headrace_target_breaker_state") == {"a/0": 0, "b/0": 0}
        assert of_targets(registry, "headrace_target_breaker_trips_total") == {"a/0": 2}


def test_so_many_targets_are_named_and_no_more(registry: CollectorRegistry) -> None:
    with model_pool() as pool:
        metrics, dispatcher = TargetMetrics(registry, max_named=3), pool.pool.dispatcher
        for number in range(20):
            dispatcher.add_target(f"w{number}/0")
            break_target(dispatcher, f"w{number}/0")
            metrics.update("tiny", pool)
            dispatcher.remove_target(f"w{number}/0")
    assert set(of_targets(registry, "headrace_target_breaker_state")) == {"w0/0", "w1/0", "w2/0"}
    trips = of_targets(registry, "headrace_target_breaker_trips_total")
    assert trips == {"w0/0": 1, "w1/0": 1, "w2/0": 1, "other": 17}


def test_wrong_predictions_are_told_in_blocks(registry: CollectorRegistry) -> None:
    with model_pool() as pool:
        metrics = RouterMetrics(registry, {"tiny": pool})
        for device, speculative, cached in [(64, 0, 64), (63, 0, 48), (64, 0, 0), (64, 64, 0), (0, 0, 32)]:
            pool.hits.observe("a/0", Hit(device=device, speculative=speculative), CachedTokens(device=cached), 16)
        for _ in range(2):
            metrics.update()

    def value(name: str, kind: str) -> float | None:
        return registry.get_sample_value(
            f"headrace_router_prediction_error_blocks_{name}", {"model": "tiny", "kind": kind}
        )

    assert (value("count", "overestimated"), value("sum", "overestimated")) == (4, 4)
    assert (value("count", "underestimated"), value("sum", "underestimated")) == (1, 2)


def test_an_index_tells_its_blocks_and_bytes(registry: CollectorRegistry) -> None:
    with model_pool() as pool:
        metrics, index = RouterMetrics(registry, {"tiny": pool}), pool.feed.index
        index.add_target("a/0")
        index.apply("a/0", stored=[bytes([number]) * 32 for number in range(1, 6)])
        metrics.update()
        assert registry.get_sample_value("headrace_router_index_blocks", {"model": "tiny"}) == 5
        assert registry.get_sample_value("headrace_router_index_bytes", {"model": "tiny"}) == index.size_bytes


def test_drift_is_what_the_engine_has_beyond_the_claims() -> None:
    with model_pool() as pool:
        pool.pool.dispatcher.add_target("a/0")
        assert pool.pool.dispatcher.choose(Query(request_id="r", prompt_tokens=3)) is not None
        routing_process.report(pool.pool.dispatcher, "a/0", running=4)
        assert pool.model.collector is not None
        text = ServerMetrics().scrape(None, [pool.model.collector]).decode()
    # The only claim is younger than the report, which need not have it.
    assert 'headrace_target_drift{model="tiny",target="a/0"} 4.0' in text


def test_processes_of_one_server_are_told_as_one(tmp_path: Path) -> None:
    def run(*arguments: str) -> dict[str, float]:
        text = subprocess.run(
            [sys.executable, "-m", "tests.support.routing_process", *arguments],
            cwd=ROOT,
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        ).stdout
        return {
            sample.name + "/" + sample.labels.get("target", ""): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    alone = run("a/0", "b/0")
    run("b/0")
    told = run()
    assert told["headrace_target_breaker_state/a/0"] == 2, "in one of them"
    assert told["headrace_target_breaker_trips_total/a/0"] == 1
    assert told["headrace_target_breaker_state/b/0"] == 2, "in two of them"
    assert told["headrace_target_breaker_trips_total/b/0"] == 2
    assert told["headrace_router_index_blocks/"] == 2, "they know the same"
    assert told["headrace_router_index_bytes/"] == 3 * alone["headrace_router_index_bytes/"], "each takes memory"
