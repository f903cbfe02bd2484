"""A summary as the lines that the terminal shows."""

from __future__ import annotations

from collections.abc import Iterator

from server.bench.serve_records import Latency, Summary


def lines(summary: Summary) -> Iterator[str]:
    """Yield the figures, then goodput and errors where there are any."""
    yield f"requests       {summary.completed} completed, {summary.failed} failed in {summary.elapsed_s:.2f} s"
    yield f"tokens         {_prompt_tokens(summary)}, {summary.output_tokens} output (by {_counter(summary)})"
    yield f"throughput     {_throughput(summary)}"
    yield f"{'':14s} {'mean':>10s} {'p50':>10s} {'p90':>10s} {'p99':>10s} {'max':>10s}"
    for name, latency in (
        ("TTFT ms", summary.ttft_ms),
        ("TPOT ms", summary.tpot_ms),
        ("ITL ms", summary.itl_ms),
        ("E2E ms", summary.e2e_ms),
        ("send delay ms", summary.send_delay_ms),
    ):
        yield f"{name:14s} {_row(latency)}"
    if summary.goodput is not None:
        good = summary.goodput
        yield f"goodput        {good.requests_per_s:.3f} requests/s, {good.share:.1%} of requests within the SLO"
    for kind, error in summary.errors.items():
        yield f"{error.count} x {kind}: {error.first_message}"


def _counter(summary: Summary) -> str:
    return summary.output_tokens_counted_by


def _prompt_tokens(summary: Summary) -> str:
    if summary.prompt_tokens is None:
        return "unknown prompt tokens"
    cached = "" if summary.cached_tokens is None else f" ({summary.cached_tokens} cached)"
    return f"{summary.prompt_tokens} prompt{cached}"


def _throughput(summary: Summary) -> str:
    figures = [f"{summary.requests_per_s:.3f} requests/s", f"{summary.output_tokens_per_s:.1f} output tokens/s"]
    if summary.total_tokens_per_s is not None:
        figures.append(f"{summary.total_tokens_per_s:.1f} tokens/s in all")
    return ", ".join(figures)


def _row(latency: Latency | None) -> str:
    if latency is None:
        return f"{'-':>10s}"
    return " ".join(f"{value:10.2f}" for value in (latency.mean, latency.p50, latency.p90, latency.p99, latency.max))
