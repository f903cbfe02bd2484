"""Summaries as text, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.simulate.report import Summary

_COLUMNS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("hit rate", lambda one: f"{one.hit_rate:.3f}"),
    ("TTFT p50", lambda one: f"{one.ttft_p50_s:.2f}"),
    ("p90", lambda one: f"{one.ttft_p90_s:.2f}"),
    ("p99 s", lambda one: f"{one.ttft_p99_s:.2f}"),
    ("TPOT ms", lambda one: f"{1e3 * one.tpot_p50_s:.0f}"),
    ("goodput", lambda one: f"{one.goodput:.3f}"),
    ("/s", lambda one: f"{one.goodput_per_s:.2f}"),
    ("shed", lambda one: str(one.shed)),
    ("max/mean tokens", lambda one: f"{one.token_imbalance:.2f}"),
    ("requests", lambda one: f"{one.request_imbalance:.2f}"),
)


def table(title: str, summaries: Sequence[Summary]) -> str:
    """Return one line per policy under a title."""
    rows = [["", *(name for name, _ in _COLUMNS)]]
    rows += [[one.policy, *(text(one) for _, text in _COLUMNS)] for one in summaries]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = ["  ".join(_cells(row, widths)).rstrip() for row in rows]
    return "\n".join([title, *lines])


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *rest = zip(row, widths, strict=True)
    return [first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)]
