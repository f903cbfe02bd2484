"""Prometheus metrics of the HTTP layer, and the engine's load as metrics. Knows requests by their route only.

Times are of this process's monotonic clock. With several API processes prometheus_client keeps the counters in files
under PROMETHEUS_MULTIPROC_DIR and a scrape of any process answers for all; the engine's own values come from the engine
and are the same everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from engine.protocol import CachedTokens, EngineLoad

CONTENT_TYPE = CONTENT_TYPE_LATEST
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
ROUTER_QUEUED = "headrace_router_queued"
"""The gauge of the router's queue (server/fleet/router_metrics.py), as far as it is there."""

E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """One per process. Its registry is its own, so that a test may have many."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.http_requests = Counter(
            "headrace_http_requests", "HTTP requests by route and status.", ["route", "status"], registry=registry
        )
        self.ttft = Histogram(
            "headrace_request_ttft_seconds",
            "From a request's arrival to its first token.",
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.itl = Histogram(
            "headrace_request_itl_seconds",
            "Between the outputs of one choice, per token.",
            buckets=ITL_BUCKETS_S,
            registry=registry,
        )
        self.e2e = Histogram(
            "headrace_request_e2e_seconds",
            "From a request's arrival to the end of its answer.",
            buckets=E2E_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Counter("headrace_prompt_tokens", "Prompt tokens.", registry=registry)
        self.cached_prompt_tokens = Counter(
            "headrace_cached_prompt_tokens", "Prompt tokens whose KV was not computed again.", registry=registry
        )
        self.loaded_prompt_tokens = Counter(
            "headrace_loaded_prompt_tokens",
            "Of the cached ones those that came from a tier of the KV store.",
            ["tier"],
            registry=registry,
        )
        self.generation_tokens = Counter("headrace_generation_tokens", "Generated tokens.", registry=registry)
        self.client_disconnects = Counter(
            "headrace_client_disconnects", "Requests whose client left before the end.", registry=registry
        )
        self.rate_limited = Counter(
            "headrace_rate_limited",
            "Requests over the limits of their API key, by which one.",
            ["limit"],
            registry=registry,
        )
        self.ignored_params = Counter(
            "headrace_ignored_params", "Unknown body fields that were ignored.", registry=registry
        )

    def count_cached(self, cached: CachedTokens) -> None:
        self.cached_prompt_tokens.inc(cached.total)
        for tier in ("ram", "disk", "remote"):
            if tokens := getattr(cached, tier):
                self.loaded_prompt_tokens.labels(tier).inc(tokens)

    def scrape(self, load: EngineLoad | None, others: Iterable[Collector] = ()) -> bytes:
        """Return the exposition, with those of `others`, which have the same names for different labels. `load` is None
        when the engine cannot be asked now: its metrics are then absent."""
        registry = self.registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        families = list(registry.collect())
        text = generate_latest(_Families(families))
        if load is not None:
            engine_registry = CollectorRegistry()
            engine_registry.register(EngineLoadCollector(load, router_queued=_router_queued(families)))
            text += generate_latest(engine_registry)
        return text + generate_latest(_Families(merged(family for other in others for family in other.collect())))


def _router_queued(families: Iterable[Metric]) -> int:
    """Return how many requests wait in the routers of all processes of this server."""
    return int(sum(sample.value for family in families if family.name == ROUTER_QUEUED for sample in family.samples))


def merged(families: Iterable[Metric]) -> Iterable[Metric]:
    """Return each name's family once, with the samples of all that have it."""
    whole: dict[str, Metric] = {}
    for family in families:
        known = whole.setdefault(family.name, family)
        if known is not family:
            known.samples += family.samples
    return whole.values()


class _Families(Collector):
    """Families of metrics that are there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class EngineLoadCollector(Collector):
    """One EngineLoad as metrics. Its totals restart from zero with the engine, as Prometheus counters may.

    `router_queued` requests wait for a turn in front of the engine: to an autoscaler they wait like the others.
    """

    def __init__(self, load: EngineLoad, *, router_queued: int = 0) -> None:
        self.load = load
        self.router_queued = router_queued

    def collect(self) -> Iterator[Metric]:
        load = self.load
        gauges: Iterable[tuple[str, str, int]] = (
            ("headrace_requests_running", "Requests in the engine's batch.", load.running),
            ("headrace_requests_waiting", "Requests waiting for the batch.", load.waiting),
            ("headrace_requests_waiting_kv", "Requests waiting for KV to be loaded.", load.waiting_kv),
            ("headrace_queued_uncached_tokens", "Prompt tokens still to be computed.", load.queued_uncached_tokens),
            (
                "headrace_running_context_tokens",
                "Tokens that decoding requests attend to.",
                load.running_context_tokens,
            ),
            ("headrace_kv_blocks_used", "KV blocks in use.", load.kv_blocks_used),
            ("headrace_kv_blocks_total", "KV blocks of the pool.", load.kv_blocks_total),
        )
        counters: Iterable[tuple[str, str, float]] = (
            ("headrace_engine_steps", "Steps of the engine.", load.steps_total),
            ("headrace_preemptions", "Requests pushed out of the batch.", load.preemptions_total),
            ("headrace_engine_prompt_tokens", "Prompt tokens, as the engine counts.", load.prompt_tokens_total),
            ("headrace_engine_cached_tokens", "Cached prompt tokens, as the engine counts.", load.cached_tokens_total),
            ("headrace_engine_output_tokens", "Output tokens, as the engine counts.", load.output_tokens_total),
            ("headrace_engine_prefill_tokens", "Prompt tokens computed.", load.prefill_tokens_total),
            ("headrace_engine_prefill_busy_seconds", "Time spent on them.", load.prefill_busy_s_total),
            ("headrace_engine_decode_tokens", "Tokens of steps without prompt tokens.", load.decode_tokens_total),
            (
                "headrace_engine_decode_context_tokens",
                "Tokens that those steps attended to.",
                load.decode_context_tokens_total,
            ),
            ("headrace_engine_decode_busy_seconds", "Time of those steps.", load.decode_busy_s_total),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(name, text, value=value)
        for name, text, total in counters:
            yield CounterMetricFamily(name, text, value=total)
        yield from _aliases(load, self.router_queued)
        ended = CounterMetricFamily("headrace_engine_requests", "Ended requests by outcome.", labels=["outcome"])
        for outcome, count in load.requests_total.items():
            ended.add_metric([outcome], count)
        yield ended


def _aliases(load: EngineLoad, router_queued: int) -> Iterator[Metric]:
    """The names by which autoscalers and dashboards made for vLLM know an engine's load."""
    usage = load.kv_blocks_used / load.kv_blocks_total if load.kv_blocks_total else 0.0
    yield GaugeMetricFamily("vllm:num_requests_running", "headrace_requests_running.", value=load.running)
    waiting = load.waiting + router_queued
    yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests waiting, also in the router.", value=waiting)
    yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Used KV blocks of all, from 0 to 1.", value=usage)
    yield CounterMetricFamily("vllm:prefix_cache_queries", "Prompt tokens.", value=load.prompt_tokens_total)
    yield CounterMetricFamily("vllm:prefix_cache_hits", "Those that were cached.", value=load.cached_tokens_total)
