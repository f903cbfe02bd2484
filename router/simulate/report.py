"""What a simulation showed, in figures."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.simulate.gateway import Outcome
from router.simulate.worker import SimWorker


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One policy under one load. Times in seconds; TTFT of the requests that were answered.

    `goodput` is the share of all requests that met the limits, and `goodput_per_s` how many did per second of arrivals.
    The imbalances are the most that one worker has over the mean of all: of computed prompt tokens, and of requests
    under way in the mean over time. `prediction_error` is the share of prompt tokens that the router was wrong about.
    """

    policy: str
    requests: int
    shed: int
    hit_rate: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    goodput: float
    goodput_per_s: float
    token_imbalance: float
    request_imbalance: float
    prediction_error: float
    ttft_s: list[float]


def summarise(
    policy: str,
    outcomes: Sequence[Outcome],
    workers: Sequence[SimWorker],
    shed: int,
    slo_ttft_s: float,
    slo_tpot_s: float | None,
) -> Summary:
    done = [one for one in outcomes if one.first_s is not None and one.end_s is not None]
    assert len(done) + shed == len(outcomes), "a request was lost"
    ttft = sorted(_ttft_s(one) for one in done)
    tpot = sorted(_tpot_s(one) for one in done if one.request.output_tokens > 1)
    good = sum(_ttft_s(one) <= slo_ttft_s and (slo_tpot_s is None or _tpot_s(one) <= slo_tpot_s) for one in done)
    prompt_tokens = sum(one.request.prompt_tokens for one in done)
    span_s = outcomes[-1].request.arrival_s - outcomes[0].request.arrival_s if outcomes else 0.0
    return Summary(
        policy=policy,
        requests=len(outcomes),
        shed=shed,
        hit_rate=sum(one.cached_tokens for one in done) / max(1, prompt_tokens),
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p90_s=quantile(ttft, 0.9),
        ttft_p99_s=quantile(ttft, 0.99),
        tpot_p50_s=quantile(tpot, 0.5),
        goodput=good / max(1, len(outcomes)),
        goodput_per_s=good / span_s if span_s > 0 else 0.0,
        token_imbalance=_imbalance([worker.prefill_tokens for worker in workers]),
        request_imbalance=_imbalance([worker.in_flight_s for worker in workers]),
        prediction_error=sum(abs(one.predicted_tokens - one.cached_tokens) for one in done) / max(1, prompt_tokens),
        ttft_s=ttft,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value that so large a share does not exceed; 0 of nothing."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _ttft_s(outcome: Outcome) -> float:
    assert outcome.first_s is not None
    return outcome.first_s - outcome.request.arrival_s


def _tpot_s(outcome: Outcome) -> float:
    assert outcome.first_s is not None
    assert outcome.end_s is not None
    return (outcome.end_s - outcome.first_s) / max(1, outcome.request.output_tokens - 1)


def _imbalance(loads: Sequence[float]) -> float:
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
