"""What each process knows by itself of each target, as Prometheus metrics: its breaker, and its reading of KV events.

Counters add up over the processes of one server; of values the worst process's is shown. A series that once was there
stays until its process ends, so the number of targets that are named is bounded.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from router.breaker import BreakerState
from server.fleet.model_pool import ModelPool

MAX_NAMED_TARGETS = 256
"""In one process, over all models and ever. What is counted of those that come later is counted for `other`."""

OTHER = "other"
BREAKER_VALUES: dict[BreakerState, int] = {"closed": 0, "half_open": 1, "open": 2}

Key = tuple[str, str]
"""Model and target."""


class TargetMetrics:
    """`update` with each pool, now and then."""

    def __init__(self, registry: CollectorRegistry, *, max_named: int = MAX_NAMED_TARGETS) -> None:
        labels = ["model", "target"]
        self._max_named = max_named
        self._named: set[Key] = set()
        self._shown: set[tuple[Gauge, str, str]] = set()
        self._breakers = Gauge(
            "headrace_target_breaker_state",
            "0 closed, 1 half open, 2 open, in the process that trusts the target least.",
            labels,
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._lags = Gauge(
            "headrace_target_event_lag_seconds",
            "Age of the last KV events when they were applied, in the process that is the furthest behind.",
            labels,
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._trips = Counter("headrace_target_breaker_trips", "How often breakers opened.", labels, registry=registry)
        self._events = Counter(
            "headrace_target_index_events",
            "Gaps, replays and resyncs of the feed of a target's KV events.",
            [*labels, "kind"],
            registry=registry,
        )

    def update(self, model: str, pool: ModelPool) -> None:
        """Hand on what a pool has counted since the last call, and how things stand. Targets that are gone are at 0."""
        breakers: dict[str, float] = {
            one.target_id: BREAKER_VALUES[one.breaker] for one in pool.pool.dispatcher.status()
        }
        self._show(self._breakers, model, breakers)
        self._show(self._lags, model, pool.feed.lags_s)
        for target, count in pool.pool.dispatcher.take_trips().items():
            self._trips.labels(model, self._label(model, target)).inc(count)
        for (target, kind), count in pool.feed.take_counts().items():
            self._events.labels(model, self._label(model, target), kind).inc(count)

    def _show(self, gauge: Gauge, model: str, values: dict[str, float]) -> None:
        for target, value in values.items():
            if self._label(model, target) != OTHER:
                self._shown.add((gauge, model, target))
                gauge.labels(model, target).set(value)
        for of_gauge, of_model, target in self._shown:
            if of_gauge is gauge and of_model == model and target not in values:
                gauge.labels(model, target).set(0)

    def _label(self, model: str, target: str) -> str:
        key = (model, target)
        if key not in self._named and len(self._named) < self._max_named:
            self._named.add(key)
        return target if key in self._named else OTHER
