"""What a CUDA device can do at most, measured: run as a module it prints one JSON line and gives the memory back.

    python -m engine.runner.ceilings random:qwen3-0.6b 1 64 256

Copying (bytes read plus written), a large bfloat16 product, and for each number of rows one decode step's matrix
products alone, through the library, as one CUDA graph.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence

import msgspec
import torch
import torch.nn.functional as F

from engine.loader.random_shapes import RANDOM_PREFIX, SHAPES
from engine.models.llama_config import LlamaConfig


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Rates in TB/s and TFLOP/s; `products_ms` by the number of rows, as text, since JSON has no other keys."""

    device: str
    torch_version: str
    copy_tb_s: float
    matmul_tflop_s: float
    products_ms: dict[str, float] = {}


def measure(shape: str | None, rows: Sequence[int]) -> Measured:
    copy, product = _copy_tb_s(), _matmul_tflop_s()
    times = {}
    if shape is not None:
        weights = _matrices(SHAPES[shape])
        times = {str(count): _products_ms(weights, count) for count in rows}
    return Measured(
        device=torch.cuda.get_device_name(),
        torch_version=str(torch.__version__),
        copy_tb_s=copy,
        matmul_tflop_s=product,
        products_ms=times,
    )


def _copy_tb_s() -> float:
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2.0 * (2 << 30) / _median_s(lambda: target.copy_(source)) / 1e12


def _matmul_tflop_s() -> float:
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2.0 * 8192**3 / _median_s(lambda: torch.mm(a, b)) / 1e12


def _matrices(config: LlamaConfig) -> list[torch.Tensor]:
    query, kv, hidden, inner = (
        config.heads * config.head_dim,
        config.kv_heads * config.head_dim,
        config.hidden_size,
        config.intermediate_size,
    )
    layer = [(query + 2 * kv, hidden), (hidden, query), (2 * inner, hidden), (hidden, inner)]
    shapes = layer * config.layers + [(config.vocab_size, hidden)]
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def _products_ms(weights: Sequence[torch.Tensor], rows: int) -> float:
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1], device="cuda", dtype=torch.bfloat16) for w in weights}

    def products() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        products()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    return _median_s(graph.replay) * 1e3


def _median_s(call: Callable[[], object]) -> float:
    """Return the median of ten calls by device events, after three that warm up."""
    times: list[float] = []
    for index in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if index >= 3:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    model, *counts = sys.argv[1:]
    known = model.removeprefix(RANDOM_PREFIX) if model.startswith(RANDOM_PREFIX) else None
    with torch.inference_mode():
        print(msgspec.json.encode(measure(known, [int(count) for count in counts])).decode())
