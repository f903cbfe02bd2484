"""What a comparison of servers writes down, and what follows from it: medians over rounds, ratios, least ratios."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from benchmarks.peer_servers import HEADRACE, LLAMA, VLLM, ServerCommand

LEAST: dict[tuple[str, int], float] = {
    (LLAMA, 1): 0.42,
    (LLAMA, 4): 1.0,
    (LLAMA, 16): 1.4,
    (VLLM, 1): 0.75,
    (VLLM, 16): 0.55,
}
"""By (peer, concurrency): our output tokens per second over the peer's that torch's own operators have to reach."""

MOST_CACHED = 0.05
"""TTFT of a prompt that is cached, over that of the same prompt before."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one server. `idle_cpu_s` is the processor time that the other servers took meanwhile."""

    round: int
    server: str
    concurrency: int
    requests: int
    failed: int
    prompt_tokens: int | None
    output_tokens: int
    elapsed_s: float
    output_tokens_per_s: float
    ttft_p50_ms: float
    itl_p50_ms: float
    e2e_p50_ms: float
    load_average: float
    idle_cpu_s: float


class CachedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt asked twice of our server."""

    round: int
    prompt_tokens: int
    cached_tokens: int
    cold_ttft_ms: float
    cached_ttft_ms: float


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The load, and each server's version and command. Rounds of equal settings may be put together."""

    model: str
    prompt_tokens: int
    output_tokens: int
    cached_prompt_tokens: int
    requests: dict[str, int]
    servers: dict[str, tuple[str, str]]
    machine: dict[str, str | int]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The file. `started_at` has the start of each run that added rounds."""

    settings: Settings
    started_at: list[str]
    turns: list[Turn]
    cached_prompts: list[CachedPrompt]
    medians: dict[str, dict[str, float]] = {}
    ratios: dict[str, float] = {}

    def with_figures(self) -> Result:
        return msgspec.structs.replace(self, medians=_medians(self.turns), ratios=dict(_ratios(self)))


def settings_of(
    model: str,
    commands: Sequence[ServerCommand],
    requests: dict[int, int],
    prompt_tokens: int,
    output_tokens: int,
    cached_prompt_tokens: int,
) -> Settings:
    return Settings(
        model=model,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_prompt_tokens=cached_prompt_tokens,
        requests={str(concurrency): count for concurrency, count in requests.items()},
        servers={spec.name: (spec.version, spec.shown) for spec in commands},
        machine=_machine(),
    )


def lines(result: Result) -> Iterator[str]:
    """Yield the figures, one server and concurrency a line, then the ratios with what they have to be."""
    for name, figures in _medians(result.turns).items():
        yield f"{name:20s} " + "  ".join(f"{key} {value:8.1f}" for key, value in figures.items())
    for name, ratio in _ratios(result):
        yield f"{name:36s} {ratio:6.3f} {_bar(name, ratio)}"


def _medians(turns: Sequence[Turn]) -> dict[str, dict[str, float]]:
    """By "server @ concurrency": medians over rounds, and of tokens per second the least and the most as well."""
    found: dict[str, dict[str, float]] = {}
    for key in sorted({(turn.concurrency, turn.server) for turn in turns}):
        own = [turn for turn in turns if (turn.concurrency, turn.server) == key]
        rates = [turn.output_tokens_per_s for turn in own]
        found[f"{key[1]} @ {key[0]}"] = {
            "tokens_per_s": statistics.median(rates),
            "low": min(rates),
            "high": max(rates),
            "ttft_ms": statistics.median(turn.ttft_p50_ms for turn in own),
            "itl_ms": statistics.median(turn.itl_p50_ms for turn in own),
            "rounds": len(own),
        }
    return found


def _ratios(result: Result) -> Iterator[tuple[str, float]]:
    """Ratios are taken round by round, where both servers had the same minute, and then their median."""
    rates = {(turn.server, turn.concurrency, turn.round): turn.output_tokens_per_s for turn in result.turns}
    for concurrency in sorted({turn.concurrency for turn in result.turns}):
        for peer in (LLAMA, VLLM):
            ratios = [
                rate / rates[peer, concurrency, number]
                for (server, at, number), rate in rates.items()
                if server == HEADRACE and at == concurrency and (peer, concurrency, number) in rates
            ]
            if ratios:
                yield _ratio_name(peer, concurrency), statistics.median(ratios)
    cached = [prompt.cached_ttft_ms / prompt.cold_ttft_ms for prompt in result.cached_prompts]
    if cached:
        yield "cached / cold TTFT", statistics.median(cached)


def _ratio_name(peer: str, concurrency: int) -> str:
    return f"{HEADRACE} / {peer} @ {concurrency}"


def _bar(name: str, ratio: float) -> str:
    if name == "cached / cold TTFT":
        return f"at most {MOST_CACHED} {'reached' if ratio <= MOST_CACHED else 'MISSED'}"
    for (peer, concurrency), least in LEAST.items():
        if name == _ratio_name(peer, concurrency):
            return f"at least {least} {'reached' if ratio >= least else 'MISSED'}"
    return ""


def _machine() -> dict[str, str | int]:
    models = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    flags = next((line.split() for line in _cpuinfo() if line.startswith("flags")), [])
    vectors = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if flag in flags]
    return {
        "cpu": models[0] if models else platform.machine(),
        "vectors": " ".join(vectors),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": version("numpy"),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
