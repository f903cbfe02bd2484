"""How busy other servers say they are: requests that run and wait, and how full their KV cache is.

They count requests and no tokens. Metrics are read as Prometheus' text, of which only the names here matter.
"""

from __future__ import annotations

import re
from typing import Protocol

import msgspec

from engine.protocol import EngineLoad

KV_PARTS = 1000
"""Into which a share of the KV cache is counted where the number of its blocks is not told."""

RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
KV_USAGE = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
CACHE_CONFIG = "vllm:cache_config_info"

SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?P<labels>\{[^}]*\})?\s+(?P<value>\S+)")
LABEL = re.compile(r'(\w+)="([^"]*)"')


class LoadReader(Protocol):
    """`path` is where the server tells it, behind its base URL."""

    @property
    def path(self) -> str: ...

    def read(self, body: bytes) -> EngineLoad | None:
        """Return the load, None where the answer does not tell any."""
        ...


class MetricsReader:
    """vLLM's names, SGLang's and llama.cpp's; values of several engines behind one port are added."""

    path = "/metrics"

    def read(self, body: bytes) -> EngineLoad | None:
        values = _values(body)
        running = next((values[name] for name in RUNNING if name in values), None)
        if running is None:
            return None
        waiting = next((values[name] for name in WAITING if name in values), (0.0, 1))
        usage = next((values[name] for name in KV_USAGE if name in values), None)
        share = 0.0 if usage is None else min(1.0, max(0.0, usage[0] / usage[1]))
        return EngineLoad(
            running=round(running[0]),
            waiting=round(waiting[0]),
            kv_blocks_used=round(share * KV_PARTS),
            kv_blocks_total=0 if usage is None else KV_PARTS,
        )


class Slot(msgspec.Struct, frozen=True):
    is_processing: bool


class SlotsReader:
    """llama.cpp's server without metrics: its slots. What waits for one is not told."""

    path = "/slots"

    def read(self, body: bytes) -> EngineLoad | None:
        try:
            slots = msgspec.json.decode(body, type=list[Slot])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return EngineLoad(running=sum(slot.is_processing for slot in slots))


READERS: tuple[LoadReader, ...] = (MetricsReader(), SlotsReader())


def block_size_of(metrics: bytes) -> int | None:
    """Return the tokens of one KV block, where vLLM's metrics tell them."""
    for line in metrics.decode("utf-8", "replace").splitlines():
        if line.startswith(CACHE_CONFIG) and (size := dict(LABEL.findall(line)).get("block_size", "")).isdecimal():
            return int(size) if 0 < int(size) <= 65536 else None
    return None


def _values(body: bytes) -> dict[str, tuple[float, int]]:
    """Return sum and number of the samples of each name that is wanted here."""
    wanted = {*RUNNING, *WAITING, *KV_USAGE}
    found: dict[str, tuple[float, int]] = {}
    for line in body.decode("utf-8", "replace").splitlines():
        sample = SAMPLE.match(line)
        if sample is None or sample["name"] not in wanted:
            continue
        try:
            value = float(sample["value"])
        except ValueError:
            continue
        if value == value and abs(value) < 1e9:  # neither NaN nor without bounds
            total, count = found.get(sample["name"], (0.0, 0))
            found[sample["name"]] = (total + value, count + 1)
    return found
