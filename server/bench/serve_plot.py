"""A result as a picture: how TTFT, TPOT and E2E are spread, and tokens per second over time. Needs matplotlib.

Draws on a figure of its own: no display, no global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from server.bench.serve_records import RequestRecord, Slo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from server.bench.serve_run import ServeResult

_LINE = "#2a6f97"
_LIMIT = "#c1121f"
_MOST_BINS = 60


def draw(result: ServeResult) -> Figure:
    """Draw four panels. Save with `figure.savefig(path)`."""
    done = [record for record in result.requests if record.error is None]
    slo = result.settings.slo or Slo()
    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplots(2, 2)
    _spread(panels[0][0], "TTFT", [record.ttft_s for record in done], slo.ttft_s)
    _spread(panels[0][1], "TPOT", [one for record in done if (one := record.tpot_s) is not None], slo.tpot_s)
    _spread(panels[1][0], "E2E", [record.e2e_s for record in done], None)
    _over_time(panels[1][1], result.requests)
    summary = result.summary
    figure.suptitle(
        f"{result.settings.options.model}: {summary.completed} of {summary.requests} requests, "
        f"{summary.requests_per_s:.3g} requests/s, {summary.output_tokens_per_s:.4g} output tokens/s"
    )
    return figure


def _spread(axes: Axes, name: str, values_s: Sequence[float], limit_s: float | None) -> None:
    """The share of requests that took so long or less."""
    ordered = sorted(1e3 * value for value in values_s)
    # The curve rises from 0 at the smallest value.
    shares = [index / len(ordered) for index in range(len(ordered) + 1)] if ordered else []
    axes.step([*ordered[:1], *ordered], shares, where="post", color=_LINE)
    if limit_s is not None:
        axes.axvline(1e3 * limit_s, color=_LIMIT, linestyle="--", label="SLO")
        axes.legend(loc="lower right")
    axes.set(title=name, xlabel="ms", ylabel="share of requests", ylim=(0, 1.02))
    axes.grid(alpha=0.3)


def _over_time(axes: Axes, records: Sequence[RequestRecord]) -> None:
    """Tokens that arrived per second, and how many requests were in flight."""
    end_s = max(record.end_s for record in records)
    width_s = max(end_s, 1e-6) / _MOST_BINS
    rates = tokens_per_s(records, width_s, _MOST_BINS)
    axes.stairs(rates, [width_s * edge for edge in range(_MOST_BINS + 1)], color=_LINE)
    axes.set(title="Over time", xlabel="s")
    axes.set_ylabel("output tokens/s", color=_LINE)
    axes.grid(alpha=0.3)
    other = axes.twinx()
    times, counts = in_flight(records)
    other.step(times, counts, where="post", color="0.5", linewidth=1)
    other.set_ylabel("requests in flight", color="0.4")
    other.set_ylim(bottom=0)


def tokens_per_s(records: Sequence[RequestRecord], width_s: float, bins: int) -> list[float]:
    """Spread each request's tokens evenly over its chunks, and count them into bins of time."""
    rates = [0.0] * bins
    for record in records:
        for at_s in record.text_s:
            share = record.output_tokens / len(record.text_s)
            rates[min(int(at_s / width_s), bins - 1)] += share / width_s
    return rates


def in_flight(records: Sequence[RequestRecord]) -> tuple[list[float], list[int]]:
    """Return the times at which the number of requests changes, and the number from then on."""
    changes = sorted([(record.sent_s, 1) for record in records] + [(record.end_s, -1) for record in records])
    counts: list[int] = []
    for _, change in changes:
        counts.append((counts[-1] if counts else 0) + change)
    return [time_s for time_s, _ in changes], counts
