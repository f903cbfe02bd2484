"""A worker's metrics: each rank's load as `headrace serve` tells it, with the rank as a label, and its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.kv_metrics import store_families
from server.metrics import EngineLoadCollector, merged
from server.worker.rank import Rank

_LABELS = ["dp_rank"]


class RanksCollector(Collector):
    """Ranks that are away have no load: their engine's series are then absent."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks

    def collect(self) -> Iterator[Metric]:
        yield from merged(self._loads())
        ready = GaugeMetricFamily("headrace_worker_ready", "Whether the rank can serve.", labels=_LABELS)
        starts = CounterMetricFamily("headrace_worker_core_starts", "Starts of the rank's process.", labels=_LABELS)
        wire = CounterMetricFamily("headrace_wire", "Events of the rank's wire.", labels=[*_LABELS, "event"])
        for rank in self._ranks:
            label = str(rank.number)
            ready.add_metric([label], float(rank.is_ready))
            starts.add_metric([label], rank.starts)
            for event, count in rank.engine.host_counters.items():
                wire.add_metric([label, event], count)
        yield from (ready, starts, wire)
        yield from store_families(
            ({"dp_rank": str(rank.number)}, load.kv_store)
            for rank in self._ranks
            if (load := rank.load) is not None and load.kv_store is not None
        )

    def _loads(self) -> Iterator[Metric]:
        for rank in self._ranks:
            if rank.load is None:
                continue
            for family in EngineLoadCollector(rank.load).collect():
                labelled = Metric(family.name, family.documentation, family.type)
                for sample in family.samples:
                    labelled.add_sample(sample.name, {**sample.labels, "dp_rank": str(rank.number)}, sample.value)
                yield labelled


def exposition(ranks: Sequence[Rank]) -> bytes:
    registry = CollectorRegistry()
    registry.register(RanksCollector(ranks))
    return generate_latest(registry)
