"""A KV store's figures as Prometheus metrics: the same families for every engine, told apart by the caller's labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvstore.manager.figures import StoreStats
from kvstore.tier import DURATION_BUCKETS_S, BreakerState, TierStats

_BREAKER_STATES: tuple[BreakerState, ...] = ("closed", "probing", "open")

_GAUGES: Sequence[tuple[str, str, str]] = (
    ("headrace_kv_tier_used_bytes", "Bytes that a tier holds; a server's are all that it holds.", "used_bytes"),
    ("headrace_kv_tier_capacity_bytes", "Bytes that a tier may hold; 0 where it does not know.", "capacity_bytes"),
    ("headrace_kv_tier_pinned_bytes", "Bytes that are kept from eviction.", "pinned_bytes"),
    ("headrace_kv_tier_objects", "Objects that a tier counts.", "objects"),
    ("headrace_kv_tier_queued_loads", "Loads that wait for a tier.", "queued_loads"),
    ("headrace_kv_tier_queued_saves", "Saves that wait for a tier.", "queued_saves"),
)
_COUNTERS: Sequence[tuple[str, str, str]] = (
    ("headrace_kv_load_bytes", "Bytes loaded from a tier.", "load_bytes_total"),
    ("headrace_kv_save_bytes", "Bytes saved to a tier.", "save_bytes_total"),
    ("headrace_kv_evictions", "Objects that a tier evicted.", "evictions_total"),
    ("headrace_kv_evicted_bytes", "Bytes that a tier evicted.", "evicted_bytes_total"),
    ("headrace_kv_breaker_trips", "How often a tier was left alone for its failures.", "breaker_trips_total"),
)


def store_families(engines: Iterable[tuple[Mapping[str, str], StoreStats]]) -> Iterator[Metric]:
    """Yield the families over all engines; each comes with its labels, which all have the same names."""
    known = [(dict(labels), stats) for labels, stats in engines]
    if not known:
        return
    names = list(known[0][0])
    tiers = [([*labels.values(), tier.tier], tier) for labels, stats in known for tier in stats.tiers]
    yield from _of_tiers([*names, "tier"], tiers)
    yield from _histograms([*names, "tier"], tiers)
    yield from _of_stores(names, [(list(labels.values()), stats) for labels, stats in known])


def _of_tiers(names: list[str], tiers: Sequence[tuple[list[str], TierStats]]) -> Iterator[Metric]:
    for name, text, field in _GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=names)
        for labels, tier in tiers:
            gauge.add_metric(labels, getattr(tier, field))
        yield gauge
    for name, text, field in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=names)
        for labels, tier in tiers:
            counter.add_metric(labels, getattr(tier, field))
        yield counter
    loads = CounterMetricFamily("headrace_kv_loads", "Loads of objects by outcome.", labels=[*names, "outcome"])
    saves = CounterMetricFamily("headrace_kv_saves", "Saves of objects by outcome.", labels=[*names, "outcome"])
    corrupt = CounterMetricFamily(
        "headrace_kv_corrupt_objects", "Objects that were not what they should be.", labels=[*names, "fault"]
    )
    breaker = GaugeMetricFamily(
        "headrace_kv_breaker_state", "0 closed, 1 probing, 2 open.", labels=[*names, "direction"]
    )
    for labels, tier in tiers:
        for family, counts in ((loads, tier.loads), (saves, tier.saves), (corrupt, tier.corrupt)):
            for what, count in counts.items():
                family.add_metric([*labels, what], count)
        for direction, state in (("load", tier.load_breaker), ("save", tier.save_breaker)):
            breaker.add_metric([*labels, direction], _BREAKER_STATES.index(state))
    yield from (loads, saves, corrupt, breaker)


def _histograms(names: list[str], tiers: Sequence[tuple[list[str], TierStats]]) -> Iterator[Metric]:
    loads = HistogramMetricFamily("headrace_kv_load_seconds", "Time of a good load of an object.", labels=names)
    saves = HistogramMetricFamily("headrace_kv_save_seconds", "Time of a good save of an object.", labels=names)
    for labels, tier in tiers:
        loads.add_metric(labels, *_buckets(tier.load_durations, tier.load_busy_s_total))
        saves.add_metric(labels, *_buckets(tier.save_durations, tier.save_busy_s_total))
    yield from (loads, saves)


def _buckets(counts: Sequence[int], total_s: float) -> tuple[list[tuple[str, float]], float]:
    bounds = [*map(str, DURATION_BUCKETS_S), "+Inf"]
    summed = list(accumulate(counts or [0] * len(bounds)))
    return list(zip(bounds, map(float, summed), strict=True)), total_s


def _of_stores(names: list[str], stores: Sequence[tuple[list[str], StoreStats]]) -> Iterator[Metric]:
    look_ups = CounterMetricFamily(
        "headrace_kv_lookup_blocks",
        "Blocks that were looked up, by whether this tier had them; a miss is one of all faster tiers too.",
        labels=[*names, "tier", "result"],
    )
    queued = GaugeMetricFamily("headrace_kv_behind_objects", "Objects to be written.", labels=[*names, "tier"])
    queued_bytes = GaugeMetricFamily("headrace_kv_behind_bytes", "Bytes to be written.", labels=[*names, "tier"])
    behind = CounterMetricFamily(
        "headrace_kv_behind_ended",
        "Objects that were to be written, by how that ended: ok, or why they were dropped.",
        labels=[*names, "tier", "reason"],
    )
    rates = GaugeMetricFamily(
        "headrace_kv_fetch_bytes_per_second", "Measured rate of whole loads.", labels=[*names, "tier"]
    )
    leases = GaugeMetricFamily("headrace_kv_leases", "Readers of stored KV in memory.", labels=names)
    overdue = GaugeMetricFamily("headrace_kv_overdue_leases", "Those that read for a minute already.", labels=names)
    fetching = GaugeMetricFamily("headrace_kv_loads_in_flight", "Objects on their way to memory.", labels=names)
    for labels, stats in stores:
        for result, counts in (("hit", stats.hits), ("miss", stats.misses)):
            for tier, count in counts.items():
                look_ups.add_metric([*labels, tier, result], count)
        for tier, queue in stats.queues.items():
            queued.add_metric([*labels, tier], queue.objects)
            queued_bytes.add_metric([*labels, tier], queue.size_bytes)
            for reason, count in queue.ended.items():
                behind.add_metric([*labels, tier, reason], count)
        for tier, rate in stats.fetch_rates.items():
            rates.add_metric([*labels, tier], rate)
        leases.add_metric(labels, stats.leases)
        overdue.add_metric(labels, stats.overdue_leases)
        fetching.add_metric(labels, stats.fetching)
    yield from (look_ups, queued, queued_bytes, behind, rates, leases, overdue, fetching)
