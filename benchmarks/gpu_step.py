"""A whole step of a decoder of real shapes and random weights, in one CUDA graph: what the GPU side of an engine costs.

    python3 -m benchmarks.gpu_step --out step.json [--models 0.6B,8B] [--no-prefill]

Variants of one step, embedding to sampled token, in the same run:

    cublas      matrix products by torch (cuBLAS), everything else by our kernels, back end "triton"
    own         the same with our linear kernel
    invariant   our linear kernel and back end "triton_invariant"
    gemms       nothing but the step's matrix products through cuBLAS: what a step cannot beat without faster products

The floor is (weights + KV read) / copy bandwidth, or the operations at the matmul rate if that is longer. Before the
times, the logits of each variant are compared with plain torch operators in float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_kernels import BACKENDS, BF16, random_batch
from benchmarks.gpu_measure import (
    Ceilings,
    capture,
    measure_ceilings,
    median_event_us,
    relative_error,
    write_record,
)
from engine.attention.base import AttentionBatch
from engine.attention.triton_backend import TritonAttention
from engine.kernels.activation import silu_and_mul
from engine.kernels.linear import linear
from engine.kernels.norm import add_rms_norm, rms_norm
from engine.kernels.rope import rotate_and_write_kv
from engine.kernels.sampling import choose_tokens
from engine.sampler.noise import Purpose, noise_keys

BLOCK_SIZE = 64
CONTEXT = 1088
EPS = 1e-6
TEMPERATURE = 0.6
LOGITS_BOUND = 5e-2
Linear = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """A published model's dimensions."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    qk_norm: bool

    @property
    def weight_shapes(self) -> list[tuple[int, int]]:
        """One layer's matrices as (out, in): qkv, o, gate and up, down."""
        query = self.heads * self.head_dim
        return [
            (query + 2 * self.kv_heads * self.head_dim, self.hidden),
            (self.hidden, query),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        ]

    @property
    def layer_parameters(self) -> int:
        return self.layers * sum(n * k for n, k in self.weight_shapes)

    @property
    def kv_bytes_per_token(self) -> int:
        return 4 * self.layers * self.kv_heads * self.head_dim


SHAPES = {
    "0.6B": Shape(1024, 3072, 28, 16, 8, 128, 151936, qk_norm=True),
    "8B": Shape(4096, 14336, 32, 32, 8, 128, 128256, qk_norm=False),
}


@dataclass(frozen=True)
class Weights:
    """Random, scaled so that activations keep their size. `layers` holds each layer's four matrices."""

    embedding: Tensor
    head: Tensor
    layers: list[list[Tensor]]
    norms: Tensor
    qk_norms: Tensor
    cos: Tensor
    sin: Tensor


def random_weights(shape: Shape, max_positions: int) -> Weights:
    def matrix(n: int, k: int) -> Tensor:
        return torch.randn(n, k, dtype=BF16, device="cuda").mul_(k**-0.5)

    half = shape.head_dim // 2
    frequencies = 1e6 ** -(torch.arange(half, device="cuda") / half)
    angles = torch.arange(max_positions, device="cuda")[:, None] * frequencies
    return Weights(
        embedding=torch.randn(shape.vocab, shape.hidden, dtype=BF16, device="cuda"),
        head=matrix(shape.vocab, shape.hidden),
        layers=[[matrix(n, k) for n, k in shape.weight_shapes] for _ in range(shape.layers)],
        norms=1 + torch.randn(2 * shape.layers + 1, shape.hidden, dtype=BF16, device="cuda") * 0.1,
        qk_norms=1 + torch.randn(shape.layers, 2, shape.head_dim, dtype=BF16, device="cuda") * 0.1,
        cos=torch.cat((angles, angles), 1).cos(),
        sin=torch.cat((-angles, angles), 1).sin(),
    )


class Step:
    """One step over one batch, with every buffer that a graph must find at its place."""

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        cache: Tensor,
        batch: AttentionBatch,
        linear: Linear,
        attention: TritonAttention,
    ) -> None:
        rows = len(batch.host_kv_lens)
        self._shape, self._weights, self._cache, self._batch = shape, weights, cache, batch
        self._linear, self._attention = linear, attention
        self._last = batch.query_starts[1:].long() - 1
        self.token_ids = torch.randint(shape.vocab, (len(batch.positions),), device="cuda")
        self._temperatures = torch.full((rows,), TEMPERATURE, device="cuda")
        self._keys = noise_keys(list(range(rows)), list(batch.host_kv_lens), Purpose.TARGET).cuda()
        self.logits: Tensor | None = None

    def __call__(self) -> Tensor:
        shape, weights, batch = self._shape, self._weights, self._batch
        residual = F.embedding(self.token_ids, weights.embedding)
        x = rms_norm(residual, weights.norms[0], EPS)
        for layer, (qkv_weight, o_weight, gate_up_weight, down_weight) in enumerate(weights.layers):
            k_cache, v_cache = self._cache[layer]
            qkv = self._linear(x, qkv_weight).view(len(x), -1, shape.head_dim)
            query = rotate_and_write_kv(
                qkv,
                batch.positions,
                weights.cos,
                weights.sin,
                k_cache,
                v_cache,
                batch.write_index,
                q_norm=weights.qk_norms[layer, 0] if shape.qk_norm else None,
                k_norm=weights.qk_norms[layer, 1] if shape.qk_norm else None,
                eps=EPS,
            )
            attended = self._attention.attend(query, k_cache, v_cache, batch, scale=shape.head_dim**-0.5)
            x = self._linear(attended.flatten(1), o_weight)
            x = add_rms_norm(x, residual, weights.norms[2 * layer + 1], EPS)
            x = self._linear(silu_and_mul(self._linear(x, gate_up_weight)), down_weight)
            x = add_rms_norm(x, residual, weights.norms[2 * layer + 2], EPS)
        if len(self._last) < len(x):
            x = x[self._last]
        self.logits = self._linear(x, weights.head)
        token_ids: Tensor
        token_ids, _ = choose_tokens(self.logits, self._temperatures, self._keys, shape.vocab)
        return token_ids


def torch_logits(shape: Shape, weights: Weights, cache: Tensor, batch: AttentionBatch, token_ids: Tensor) -> Tensor:
    """The decode step of `Step` in float32 torch operators, over the KV that the cache holds for earlier positions."""
    rows, dim = len(token_ids), shape.head_dim
    x = weights.embedding[token_ids].float()
    position = torch.arange(int(batch.kv_lens[0]), device="cuda")
    block = batch.block_tables[:, position // BLOCK_SIZE].long()
    cos, sin = weights.cos[batch.positions, None], weights.sin[batch.positions, None]
    for layer, (qkv_weight, o_weight, gate_up_weight, down_weight) in enumerate(weights.layers):
        normed = F.rms_norm(x, (shape.hidden,), weights.norms[2 * layer].float(), EPS)
        qkv = F.linear(normed, qkv_weight.float()).view(rows, -1, dim)
        q, k, v = torch.split(qkv, [shape.heads, shape.kv_heads, shape.kv_heads], 1)
        if shape.qk_norm:
            q = F.rms_norm(q, (dim,), weights.qk_norms[layer, 0].float(), EPS)
            k = F.rms_norm(k, (dim,), weights.qk_norms[layer, 1].float(), EPS)
        q, k = (part * cos + part.roll(dim // 2, -1) * sin for part in (q, k))
        keys, values = (kept[block, :, position % BLOCK_SIZE].float() for kept in cache[layer])
        keys[:, -1], values[:, -1] = k, v
        keys, values = (kept.repeat_interleave(shape.heads // shape.kv_heads, 2) for kept in (keys, values))
        weight = (torch.einsum("rhd,rkhd->rhk", q, keys) * dim**-0.5).softmax(-1)
        x = x + F.linear(torch.einsum("rhk,rkhd->rhd", weight, values).flatten(1), o_weight.float())
        normed = F.rms_norm(x, (shape.hidden,), weights.norms[2 * layer + 1].float(), EPS)
        gate, up = F.linear(normed, gate_up_weight.float()).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, down_weight.float())
    return F.linear(F.rms_norm(x, (shape.hidden,), weights.norms[-1].float(), EPS), weights.head.float())


def gemms_only(shape: Shape, weights: Weights, tokens: int, rows: int) -> Callable[[], None]:
    inputs = {k: torch.randn(tokens, k, dtype=BF16, device="cuda") for _, k in shape.weight_shapes}
    last = torch.randn(rows, shape.hidden, dtype=BF16, device="cuda")

    def run() -> None:
        for layer in weights.layers:
            for weight in layer:
                F.linear(inputs[weight.shape[1]], weight)
        F.linear(last, weights.head)

    return run


def variants() -> dict[str, tuple[Linear, TritonAttention]]:
    return {
        "cublas": (F.linear, TritonAttention("triton", BACKENDS["triton"])),
        "own": (linear, TritonAttention("triton", BACKENDS["triton"])),
        "invariant": (linear, TritonAttention("triton_invariant", BACKENDS["triton_invariant"])),
    }


def floor_us(shape: Shape, ceilings: Ceilings, query_lens: list[int], kv_lens: list[int]) -> float:
    tokens, head = sum(query_lens), shape.vocab * shape.hidden
    read_bytes = 2.0 * (shape.layer_parameters + head) + shape.kv_bytes_per_token * float(sum(kv_lens))
    pairs = sum(q * (kv - q) + q * (q + 1) / 2 for q, kv in zip(query_lens, kv_lens, strict=True))
    attention = 4.0 * shape.layers * shape.heads * shape.head_dim * pairs
    flops = 2.0 * (shape.layer_parameters * tokens + head * len(query_lens)) + attention
    return ceilings.floor_us(read_bytes, flops)


def measure(
    model: str, weights: Weights, query_lens: list[int], kv_lens: list[int], names: list[str], ceilings: Ceilings
) -> list[dict[str, object]]:
    """Time the variants on one batch; print and return a row each."""
    shape, rows = SHAPES[model], len(query_lens)
    batch, blocks = random_batch(query_lens, kv_lens, BLOCK_SIZE)
    cache = torch.empty(shape.layers, 2, blocks, shape.kv_heads, BLOCK_SIZE, shape.head_dim, dtype=BF16, device="cuda")
    cache.normal_()
    tokens, what = sum(query_lens), f"{rows}x{query_lens[0]}" if query_lens[0] > 1 else f"batch {rows}"
    gemms_us = median_event_us(capture(gemms_only(shape, weights, tokens, rows)).replay, repeats=20)
    floor = floor_us(shape, ceilings, query_lens, kv_lens)
    results: list[dict[str, object]] = []
    for name in names:
        linear_of, attention = variants()[name]
        step = Step(shape, weights, cache, batch, linear_of, attention)
        graph = capture(step)
        step_us = median_event_us(graph.replay, repeats=20)
        per_s = (tokens if tokens > rows else rows) / step_us * 1e6
        results.append(
            {
                "model": model, "batch": what, "context": kv_lens[0], "variant": name, "step_us": step_us,
                "gemms_us": gemms_us, "floor_us": floor, "tokens_per_s": per_s,
            }
        )  # fmt: skip
        print(
            f"{model:5s} {what:10s} {name:10s} {step_us / 1e3:9.3f} ms  gemms {gemms_us / 1e3:8.3f}  "
            f"x{step_us / gemms_us:5.2f}  floor {floor / 1e3:8.3f}  share {floor / step_us:4.2f}  {per_s:10.0f} tok/s",
            flush=True,
        )
        del graph, step
    return results


def check_logits(model: str, weights: Weights) -> tuple[list[dict[str, object]], int]:
    """Compare each variant's logits with torch's in float32, and a replayed graph's with those of separate launches."""
    shape, rows = SHAPES[model], 5
    batch, blocks = random_batch([1] * rows, [300] * rows, BLOCK_SIZE)
    cache = torch.randn(shape.layers, 2, blocks, shape.kv_heads, BLOCK_SIZE, shape.head_dim, dtype=BF16, device="cuda")
    results: list[dict[str, object]] = []
    failures = 0
    for name, (linear_of, attention) in variants().items():
        step = Step(shape, weights, cache, batch, linear_of, attention)
        expected = torch_logits(shape, weights, cache, batch, step.token_ids)
        step()
        assert step.logits is not None
        together = step.logits.clone()
        capture(step).replay()
        error = relative_error(together, expected)
        replayed = bool(torch.equal(step.logits, together))
        passed = error <= LOGITS_BOUND and (replayed or name == "cublas")
        failures += not passed
        results.append({"check": f"{model} logits, {name}", "error": error, "replay_equal": replayed, "passed": passed})
        verdict = "ok" if passed else "FAILED"
        print(f"{model:5s} check {name:10s} relative error {error:.2e}  replay equal {replayed}  {verdict}", flush=True)
    return results, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON record goes")
    parser.add_argument("--models", default="0.6B,8B")
    parser.add_argument("--no-prefill", action="store_true")
    args = parser.parse_args()
    ceilings = measure_ceilings()
    print(f"{torch.cuda.get_device_name()}: {ceilings}", flush=True)
    rows: list[dict[str, object]] = []
    failures = 0
    settings: dict[str, object] = {"context": CONTEXT, "block_size": BLOCK_SIZE, "temperature": TEMPERATURE}
    with torch.inference_mode():
        for model in args.models.split(","):
            weights = random_weights(SHAPES[model], 8192)
            checks, failed = check_logits(model, weights)
            rows += checks
            failures += failed
            for batch_rows in (1, 32, 64, 256):
                rows += measure(model, weights, [1] * batch_rows, [CONTEXT] * batch_rows, list(variants()), ceilings)
            for count, length in [] if args.no_prefill else [(1, 1024), (1, 8192), (64, 512)]:
                rows += measure(model, weights, [length] * count, [length] * count, ["cublas", "invariant"], ceilings)
            del weights
            torch.cuda.empty_cache()
            write_record(args.out, "gpu_step", ceilings, settings, rows)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
