"""What the router has done, as Prometheus metrics. They add up over the processes of one server.

The router counts by itself and knows no Prometheus; what has been added is handed on every second. prometheus_client
keeps the sums of several processes apart and adds them when any of them is scraped (server/metrics.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from server.fleet.model_pool import ModelPool
from server.fleet.target_metrics import TargetMetrics
from server.metrics import ROUTER_QUEUED

UPDATE_INTERVAL_S = 1.0

DECISION_BUCKETS_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
ERROR_BUCKETS_BLOCKS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

PREDICTION_KINDS = ("predicted", "cached", "overestimated", "underestimated")

QUEUE_WAIT_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

Labels = tuple[str, ...]


class RouterMetrics:
    """Of the pools in `pools`, by model. Nothing here names a request or a tenant; what is told by target is in
    server/fleet/target_metrics.py."""

    def __init__(self, registry: CollectorRegistry, pools: dict[str, ModelPool]) -> None:
        self._pools = pools
        self._handed_on: dict[tuple[str, Labels], float] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"headrace_router_{name}", text, ["model", *labels], registry=registry)

        def gauge(name: str, text: str, *labels: str, over: Literal["livesum", "livemax"]) -> Gauge:
            return Gauge(name, text, ["model", *labels], registry=registry, multiprocess_mode=over)

        def histogram(name: str, text: str, *labels: str, buckets: Sequence[float]) -> Histogram:
            name = f"headrace_router_{name}"
            return Histogram(name, text, ["model", *labels], buckets=buckets, registry=registry)

        self._counters = {
            "requests": counter("requests", "Attempts by how they ended.", "policy", "outcome"),
            "retries": counter("retries", "Attempts that another one followed, by why.", "cause"),
            "prediction": counter("prediction_tokens", "Prompt tokens predicted to be cached, and found so.", "kind"),
            "suspicions": counter("index_suspicions", "Runs of wrong predictions: a target's digest was compared."),
            "index": counter("index_events", "Gaps, replays and resyncs of the index's feed.", "kind"),
            "shed": counter("shed", "Requests that got no turn, by why.", "reason"),
        }
        self._queued = gauge(ROUTER_QUEUED, "Requests that wait in the router.", "class", over="livesum")
        # Each process has an index of its own, and all follow the same engines: memory adds up, content does not.
        self._index_blocks = gauge(
            "headrace_router_index_blocks",
            "Different KV blocks that the prefix index knows, in the process that knows most.",
            over="livemax",
        )
        self._index_bytes = gauge(
            "headrace_router_index_bytes", "Memory of the prefix indexes, over all processes.", over="livesum"
        )
        self._decisions = histogram(
            "decision_seconds", "Hashing a prompt, looking it up and choosing a target.", buckets=DECISION_BUCKETS_S
        )
        self._errors = histogram(
            "prediction_error_blocks",
            "Blocks by which a predicted hit was wrong; one that was right counts as overestimated by 0.",
            "kind",
            buckets=ERROR_BUCKETS_BLOCKS,
        )
        self._queue_wait = histogram(
            "queue_wait_seconds",
            "How long requests waited in the router until they were let through.",
            buckets=QUEUE_WAIT_BUCKETS_S,
        )
        self._targets = TargetMetrics(registry)

    async def keep_updated(self) -> None:
        while True:
            self.update()
            await asyncio.sleep(UPDATE_INTERVAL_S)

    def update(self) -> None:
        """Hand on what has been counted since the last call."""
        for model, pool in self._pools.items():
            admission = pool.pool.admission
            for priority_class, queued in admission.queued_by_class.items():
                self._queued.labels(model, priority_class).set(queued)
            for wait_s in admission.take_waits():
                self._queue_wait.labels(model).observe(wait_s)
            self._index_blocks.labels(model).set(pool.feed.index.num_blocks)
            self._index_bytes.labels(model).set(pool.feed.index.size_bytes)
            for time_s in pool.pool.take_decision_times():
                self._decisions.labels(model).observe(time_s)
            for blocks in pool.hits.take_errors():
                kind = "underestimated" if blocks < 0 else "overestimated"
                self._errors.labels(model, kind).observe(abs(blocks))
            self._targets.update(model, pool)
            for name, labels, total in _totals(pool):
                key = (name, (model, *labels))
                if (more := total - self._handed_on.get(key, 0.0)) > 0:
                    self._counters[name].labels(model, *labels).inc(more)
                    self._handed_on[key] = total


def _totals(pool: ModelPool) -> Iterator[tuple[str, Labels, float]]:
    """Yield (metric, labels, cumulative value)."""
    dispatcher = pool.pool.dispatcher
    for outcome, count in dispatcher.outcomes.items():
        yield "requests", (dispatcher.policy.name, outcome), count
    for cause in ("resumed", "retried", "pressed"):
        yield "retries", (cause,), pool.supervisor.counters[cause]
    for kind in PREDICTION_KINDS:
        yield "prediction", (kind,), pool.hits.counters[f"{kind}_tokens"]
    yield "suspicions", (), pool.hits.counters["suspicions"]
    for kind, count in pool.feed.counters.items():
        yield "index", (kind,), count
    for reason, count in pool.pool.admission.shed.items():
        yield "shed", (reason,), count
