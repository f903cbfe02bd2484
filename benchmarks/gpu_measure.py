"""What GPU benchmarks share: this machine's ceilings, timing by graph replay, error norms, and the record."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

Call = Callable[[], object]


@dataclass(frozen=True)
class Ceilings:
    """Measured in the same run: bytes read plus written by a large copy, and a large bf16 product of random data."""

    copy_tb_s: float
    matmul_tflop_s: float

    def floor_us(self, size_bytes: float, flops: float = 0.0) -> float:
        """Return the least time in which these bytes can move and these operations be done."""
        return max(size_bytes / self.copy_tb_s, flops / self.matmul_tflop_s) / 1e6


def measure_ceilings() -> Ceilings:
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy_us = median_event_us(lambda: target.copy_(source), repeats=10)
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    matmul_us = median_event_us(lambda: torch.mm(a, b), repeats=10)
    return Ceilings(2 * source.numel() / copy_us / 1e6, 2 * 8192**3 / matmul_us / 1e6)


def median_event_us(call: Call, *, repeats: int, warmups: int = 3) -> float:
    """Return the median time of single calls, by device events."""
    for _ in range(warmups):
        call()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def capture(call: Call) -> torch.cuda.CUDAGraph:
    """Return a graph of one call, compiled and warmed up before the capture."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def rotating_us(calls: Sequence[Call], *, repeats: int = 10) -> float:
    """Return the median time of one call when all `calls` (input sets beyond L2 together) run one after another."""

    def all_calls() -> None:
        for call in calls:
            call()

    graph = capture(all_calls)
    return median_event_us(graph.replay, repeats=repeats) / len(calls)


def sets_beyond_l2(bytes_per_set: float, *, least: int = 2, most: int = 24) -> int:
    """Return how many input sets are needed so that none is in L2 (60 MB on an H200) when its turn comes again."""
    return int(min(most, max(least, 200e6 // bytes_per_set + 1)))


def leave_nan(shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> None:
    """Free a tensor of NaN of this shape: the allocator hands the memory out again as the next output of that size."""
    torch.full(tuple(shape), torch.nan, dtype=dtype, device="cuda")


def relative_error(actual: Tensor, reference: Tensor) -> float:
    """Return ||actual - reference|| / ||reference||; NaN stays NaN and passes no bound."""
    return float((actual.double() - reference.double()).norm() / reference.double().norm())


def write_record(
    path: Path, name: str, ceilings: Ceilings, settings: dict[str, object], rows: list[dict[str, object]]
) -> None:
    record = {
        "benchmark": name,
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "ceilings": asdict(ceilings),
        "settings": settings,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
