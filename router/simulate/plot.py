"""Summaries as a picture: how TTFT is spread, and goodput over load. Needs matplotlib.

Draws on a figure of its own: no display, no global state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from router.simulate.report import Summary


def draw(loads: Mapping[str, Sequence[Summary]], slo_ttft_s: float) -> Figure:
    """Draw one panel per load and one for all. Save with `figure.savefig(path)`."""
    figure = Figure(figsize=(4.5 * (len(loads) + 1), 4), layout="constrained")
    *panels, last = figure.subplots(1, len(loads) + 1, squeeze=False)[0]
    for axes, (load, summaries) in zip(panels, loads.items(), strict=True):
        for one in summaries:
            shares = [(1 + index) / one.requests for index in range(len(one.ttft_s))]
            axes.step(one.ttft_s, shares, where="post", label=one.policy)
        axes.axvline(slo_ttft_s, color="0.5", linestyle="--")
        axes.set(title=load, xlabel="TTFT (s)", ylabel="share of requests", xscale="log", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    for policy in dict.fromkeys(one.policy for summaries in loads.values() for one in summaries):
        values = [one.goodput for summaries in loads.values() for one in summaries if one.policy == policy]
        last.plot(list(loads)[: len(values)], values, marker="o", label=policy)
    last.set(title=f"TTFT within {slo_ttft_s:g} s", ylabel="share of requests", ylim=(0, 1.02))
    last.grid(alpha=0.3)
    last.legend(fontsize="small")
    return figure
