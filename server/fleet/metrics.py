"""The targets of one model as metrics: what every process that routes over them sees alike, but for milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.manager.figures import StoreStats
from server.kv_metrics import store_families


class TargetsCollector(Collector):
    """`ready` tells by target id whether requests can be sent there, `in_flight` how many have been, peers' too, and
    `drift` how many more the engine itself counts (`TargetBooks.drift`), and `stores` what KV stores told last."""

    def __init__(
        self,
        model: str,
        ready: Callable[[], Mapping[str, bool]],
        in_flight: Callable[[], Mapping[str, int]],
        drift: Callable[[], Mapping[str, int]],
        stores: Callable[[], Mapping[str, StoreStats]] = dict,
    ) -> None:
        self._model = model
        self._ready = ready
        self._in_flight = in_flight
        self._drift = drift
        self._stores = stores

    def collect(self) -> Iterator[Metric]:
        labels = ["model", "target"]
        ready = GaugeMetricFamily("headrace_target_ready", "Whether an engine can be asked now.", labels=labels)
        in_flight = GaugeMetricFamily("headrace_target_in_flight", "Requests under way at an engine.", labels=labels)
        drift = GaugeMetricFamily(
            "headrace_target_drift",
            "Requests that an engine counts beyond those under way from here.",
            labels=labels,
        )
        for target, is_ready in self._ready().items():
            ready.add_metric([self._model, target], is_ready)
        for target, count in self._in_flight().items():
            in_flight.add_metric([self._model, target], count)
        for target, count in self._drift().items():
            drift.add_metric([self._model, target], count)
        yield ready
        yield in_flight
        yield drift
        yield from store_families(
            ({"model": self._model, "target": target}, stats) for target, stats in self._stores().items()
        )
