"""Each Triton kernel on the GPU: checked against float64, then timed as a share of what the machine can do at all.

    python3 -m benchmarks.gpu_kernels --out kernels.json [--only attention,linear] [--sweep]

Inputs are random and drawn anew; outputs are poisoned before a check. A time is the median of graph replays that walk
input sets larger than L2 together; its floor is the larger of bytes / copy bandwidth and operations / matmul rate, both
measured first. Exits with 1 when an error bound or a bitwise promise is broken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_measure import (
    Call,
    Ceilings,
    leave_nan,
    measure_ceilings,
    relative_error,
    rotating_us,
    sets_beyond_l2,
    write_record,
)
from engine.attention.base import AttentionBatch
from engine.attention.triton_backend import DEFAULT_TILES, INVARIANT_TILES, TritonAttention
from engine.kernels.activation import silu_and_mul
from engine.kernels.kv import write_kv
from engine.kernels.linear import LinearTiles, linear, tiles_for
from engine.kernels.norm import add_rms_norm, rms_norm
from engine.kernels.rope import rotate_and_write_kv
from engine.kernels.sampling import choose_tokens
from engine.sampler.noise import Purpose, gumbel, noise_keys, noise_words

BF16 = torch.bfloat16
BF16_BOUND = 1e-2
BLOCK_SIZE = 64
HEAD_DIM = 128
HEAD_SHAPES = {"0.6B": (16, 8), "8B": (32, 8)}
WEIGHT_SHAPES = {
    "0.6B": {
        "qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072), "head": (151936, 1024),
    },
    "8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
}  # fmt: skip
BACKENDS = {"triton": DEFAULT_TILES, "triton_invariant": INVARIANT_TILES}


class Report:
    """Collects checks and times, printing each as it comes: a run that is cut off has still said what it saw."""

    def __init__(self, ceilings: Ceilings) -> None:
        self.ceilings = ceilings
        self.rows: list[dict[str, object]] = []
        self.failures = 0

    def check(self, name: str, error: float, bound: float) -> None:
        """Zero as a bound asks for equal bits."""
        passed = error <= bound
        self.failures += not passed
        self.rows.append({"check": name, "error": error, "bound": bound, "passed": passed})
        print(f"check {name:58s} {error:9.2e}  {'ok' if passed else 'FAILED, bound ' + str(bound)}", flush=True)

    def time(self, name: str, calls: list[Call], size_bytes: float, flops: float = 0.0, library: float = 0.0) -> float:
        """Time calls of one kind; `library` is another implementation's time of the same work."""
        time_us = rotating_us(calls)
        floor_us = self.ceilings.floor_us(size_bytes, flops)
        row: dict[str, object] = {"time": name, "us": time_us, "floor_us": floor_us, "share": floor_us / time_us}
        beside = ""
        if library:
            row["library_us"] = library
            beside = f"  library {library:9.2f} us"
        self.rows.append(row)
        print(
            f"time  {name:58s} {time_us:9.2f} us  floor {floor_us:9.2f}  share {floor_us / time_us:4.2f}{beside}",
            flush=True,
        )
        return time_us


def random_batch(query_lens: list[int], kv_lens: list[int], block_size: int) -> tuple[AttentionBatch, int]:
    """Return a batch whose blocks lie shuffled in the cache, and the number of blocks it needs."""
    rows, width = len(kv_lens), -(-max(kv_lens) // block_size)
    tables = (torch.randperm(rows * width, device="cuda") + 1).view(rows, width).to(torch.int32)
    lens = torch.tensor(kv_lens, dtype=torch.int32, device="cuda")
    positions = torch.cat([torch.arange(kv - q, kv, device="cuda") for q, kv in zip(query_lens, kv_lens, strict=True)])
    row_of = torch.repeat_interleave(torch.arange(rows, device="cuda"), torch.tensor(query_lens, device="cuda"))
    slots = tables[row_of, positions // block_size].long() * block_size + positions % block_size
    starts = torch.tensor([0, *query_lens], device="cuda").cumsum(0).to(torch.int32)
    batch = AttentionBatch(positions, slots, tables, starts, lens, tuple(query_lens), tuple(kv_lens), block_size)
    return batch, rows * width + 1


def random_kv(blocks: int, kv_heads: int, block_size: int, head_dim: int = HEAD_DIM) -> tuple[Tensor, Tensor]:
    shape = (blocks, kv_heads, block_size, head_dim)
    return torch.randn(shape, dtype=BF16, device="cuda"), torch.randn(shape, dtype=BF16, device="cuda")


def attention_reference(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float, window: int | None
) -> Tensor:
    """Attention in float64, row by row."""
    group = query.shape[1] // k_cache.shape[1]
    out, begin = [], 0
    for row, (query_len, kv_len) in enumerate(zip(batch.host_query_lens, batch.host_kv_lens, strict=True)):
        position = torch.arange(kv_len, device="cuda")
        block = batch.block_tables[row, position // batch.block_size].long()
        keys = k_cache[block, :, position % batch.block_size].double().repeat_interleave(group, 1)
        values = v_cache[block, :, position % batch.block_size].double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query[begin : begin + query_len].double(), keys) * scale
        own = position[kv_len - query_len :, None]
        hidden = position[None] > own
        if window is not None:
            hidden |= position[None] <= own - window
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values))
        begin += query_len
    return torch.cat(out)


def check_attention(report: Report) -> None:
    query_lens, kv_lens = [1, 300, 1, 5, 64, 1], [1000, 300, 17, 900, 700, 2049]
    for name, tiles in BACKENDS.items():
        for heads, kv_heads, head_dim in [(16, 8, 128), (9, 3, 64), (28, 4, 128), (8, 1, 256)]:
            for block_size, window in [(64, None), (16, None), (256, None), (64, 200)]:
                if heads != 16 and (block_size, window) != (64, None):
                    continue
                batch, blocks = random_batch(query_lens, kv_lens, block_size)
                k_cache, v_cache = random_kv(blocks, kv_heads, block_size, head_dim)
                query = torch.randn(sum(query_lens), heads + 2 * kv_heads, head_dim, dtype=BF16, device="cuda")[
                    :, :heads
                ]
                scale = head_dim**-0.5
                expected = attention_reference(query, k_cache, v_cache, batch, scale, window)
                leave_nan(expected.shape)
                actual = TritonAttention(name, tiles).attend(
                    query, k_cache, v_cache, batch, scale=scale, window_tokens=window
                )
                label = f"{name} {heads}/{kv_heads}x{head_dim} block {block_size} window {window}"
                report.check(label, relative_error(actual, expected), BF16_BOUND)


def check_long_prompts(report: Report) -> None:
    """Rows that are long enough for a kernel of their own, with NaN where nobody has written."""
    query_lens, kv_lens = [3000, 1100, 1], [3000, 2133, 700]
    for heads, kv_heads, head_dim in [(16, 8, 128), (9, 3, 64), (28, 4, 128), (32, 8, 128)]:
        for block_size in (64, 128):
            batch, blocks = random_batch(query_lens, kv_lens, block_size)
            k_cache, v_cache = random_kv(blocks, kv_heads, block_size, head_dim)
            for row, kv_len in enumerate(kv_lens):
                last = int(batch.block_tables[row, (kv_len - 1) // block_size])
                for cache in (k_cache, v_cache):
                    cache[last, :, (kv_len - 1) % block_size + 1 :] = float("nan")
            query = torch.randn(sum(query_lens), heads + 2 * kv_heads, head_dim, dtype=BF16, device="cuda")[:, :heads]
            expected = attention_reference(query, k_cache, v_cache, batch, head_dim**-0.5, None)
            leave_nan(expected.shape)
            backend = TritonAttention("triton", BACKENDS["triton"])
            actual = backend.attend(query, k_cache, v_cache, batch, scale=head_dim**-0.5)
            label = f"long prompts {heads}/{kv_heads}x{head_dim} block {block_size}"
            report.check(label, relative_error(actual, expected), BF16_BOUND)


def check_attention_invariance(report: Report) -> None:
    """A token alone, in a batch, whole, in chunks, and decoded: equal bits, and the default back end's difference."""
    for name, tiles in BACKENDS.items():
        lens = [1500, 700, 40]
        batch, blocks = random_batch(lens, lens, BLOCK_SIZE)
        k_cache, v_cache = random_kv(blocks, 8, BLOCK_SIZE)
        query = torch.randn(sum(lens), 16, HEAD_DIM, dtype=BF16, device="cuda")
        backend = TritonAttention(name, tiles)
        whole = backend.attend(query, k_cache, v_cache, batch, scale=0.09)
        for counts in [(1, 1, 1), (2, 1, 40), (300, 64, 7), (999, 33, 1)]:
            ends = [1500, 2200, 2240]
            keep = torch.cat([torch.arange(e - c, e, device="cuda") for e, c in zip(ends, counts, strict=True)])
            starts = torch.tensor([0, *counts], device="cuda").cumsum(0).to(torch.int32)
            part = replace(batch, query_starts=starts, host_query_lens=counts)
            tail = backend.attend(query[keep], k_cache, v_cache, part, scale=0.09)
            differing = float((tail != whole[keep]).double().mean())
            bound = 0.0 if name == "triton_invariant" else 1.0
            report.check(f"{name} share of differing values, last {counts} of {lens}", differing, bound)


def decode_calls(
    rows: int, kv_len: int, heads: int, kv_heads: int, backend: TritonAttention
) -> tuple[list[Call], float]:
    kv_bytes = rows * kv_len * kv_heads * HEAD_DIM * 4
    calls: list[Call] = []
    for _ in range(sets_beyond_l2(kv_bytes)):
        batch, blocks = random_batch([1] * rows, [kv_len] * rows, BLOCK_SIZE)
        k_cache, v_cache = random_kv(blocks, kv_heads, BLOCK_SIZE)
        query = torch.randn(rows, heads, HEAD_DIM, dtype=BF16, device="cuda")
        calls.append(partial(backend.attend, query, k_cache, v_cache, batch, scale=0.09))
    return calls, kv_bytes + 4.0 * rows * heads * HEAD_DIM


def time_decode_attention(report: Report) -> None:
    for name, tiles in BACKENDS.items():
        for model, (heads, kv_heads) in HEAD_SHAPES.items():
            for rows, kv_len in [(1, 1088), (32, 1088), (64, 1088), (256, 1088), (8, 8064), (32, 8064)]:
                calls, size_bytes = decode_calls(rows, kv_len, heads, kv_heads, TritonAttention(name, tiles))
                report.time(f"{name} decode {model} {rows}x{kv_len}", calls, size_bytes)


def time_prefill_attention(report: Report) -> None:
    for model, (heads, kv_heads) in HEAD_SHAPES.items():
        for rows, length in [(1, 1024), (1, 8192), (64, 512)]:
            batch, blocks = random_batch([length] * rows, [length] * rows, BLOCK_SIZE)
            k_cache, v_cache = random_kv(blocks, kv_heads, BLOCK_SIZE)
            query = torch.randn(rows * length, heads, HEAD_DIM, dtype=BF16, device="cuda")
            flops = 2.0 * heads * HEAD_DIM * rows * length * (length + 1)
            size_bytes = 4.0 * rows * length * (heads + kv_heads) * HEAD_DIM
            sdpa_us = rotating_us([partial(_sdpa, rows, length, heads)])
            for name, tiles in BACKENDS.items():
                call = partial(TritonAttention(name, tiles).attend, query, k_cache, v_cache, batch, scale=0.09)
                report.time(f"{name} prefill {model} {rows}x{length}", [call], size_bytes, flops, sdpa_us)


_sdpa_inputs: dict[tuple[int, int, int], Tensor] = {}


def _sdpa(rows: int, length: int, heads: int) -> Tensor:
    """Torch's own flash attention over contiguous KV with all heads expanded: the same arithmetic without pages."""
    key = (rows, heads, length)
    if key not in _sdpa_inputs:
        _sdpa_inputs.clear()
        _sdpa_inputs[key] = torch.randn(3, rows, heads, length, HEAD_DIM, dtype=BF16, device="cuda")
    q, k, v = _sdpa_inputs[key]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sweep_attention(report: Report) -> None:
    """Other tiles than the packaged ones, for the next choice of defaults."""
    base = DEFAULT_TILES
    for split_tokens, kv_tile, buffers, warps in [
        (128, 64, 2, 4), (256, 64, 1, 4), (256, 64, 3, 4), (256, 64, 2, 2), (256, 32, 3, 2), (256, 128, 1, 4),
        (512, 64, 2, 4),
    ]:  # fmt: skip
        tiles = replace(base, split_tokens=split_tokens, kv_tile=kv_tile, kv_buffers=buffers, split_warps=warps)
        for rows in (1, 64):
            calls, size_bytes = decode_calls(rows, 1088, 16, 8, TritonAttention("sweep", tiles))
            label = f"sweep decode {rows}x1088 split {split_tokens} tile {kv_tile} buffers {buffers} warps {warps}"
            report.time(label, calls, size_bytes)
    batch, blocks = random_batch([8192], [8192], BLOCK_SIZE)
    k_cache, v_cache = random_kv(blocks, 8, BLOCK_SIZE)
    query = torch.randn(8192, 32, HEAD_DIM, dtype=BF16, device="cuda")
    for rows, warps, kv_tile, buffers in [
        (128, 8, 64, 1),
        (128, 8, 64, 3),
        (64, 4, 64, 2),
        (128, 4, 64, 1),
        (128, 8, 128, 1),
    ]:
        tiles = replace(base, prefill_rows=rows, prefill_warps=warps, kv_tile=kv_tile, kv_buffers=buffers)
        call = partial(TritonAttention("sweep", tiles).attend, query, k_cache, v_cache, batch, scale=0.09)
        label = f"sweep prefill 8B 1x8192 rows {rows} warps {warps} tile {kv_tile} buffers {buffers}"
        report.time(label, [call], 4.0 * 8192 * 40 * HEAD_DIM, 2.0 * 32 * HEAD_DIM * 8192 * 8193)


def row_kernel_calls(
    tokens: int, hidden: int, inner: int, heads: int, kv_heads: int, norm: bool
) -> Iterator[tuple[str, Call, float]]:
    """Yield (kernel, a call on fresh inputs, bytes) for one token count and model."""
    x, residual = torch.randn(2, tokens, hidden, dtype=BF16, device="cuda")
    weight = torch.randn(hidden, dtype=BF16, device="cuda")
    row = 2.0 * tokens * hidden
    yield "rms_norm", partial(rms_norm, x, weight, 1e-6), 2 * row
    yield "add_rms_norm", partial(add_rms_norm, x, residual, weight, 1e-6), 4 * row
    gate_up = torch.randn(tokens, 2 * inner, dtype=BF16, device="cuda")
    yield "silu_and_mul", partial(silu_and_mul, gate_up), 6.0 * tokens * inner
    k_cache, v_cache = random_kv(-(-tokens // BLOCK_SIZE) + 1, kv_heads, BLOCK_SIZE)
    slots = torch.randperm(tokens, device="cuda") + BLOCK_SIZE
    total = heads + 2 * kv_heads
    qkv = torch.randn(tokens, total, HEAD_DIM, dtype=BF16, device="cuda")
    key, value = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    kv_row = 2.0 * tokens * kv_heads * HEAD_DIM
    yield "write_kv", partial(write_kv, key, value, k_cache, v_cache, slots, BLOCK_SIZE), 4 * kv_row
    angles = torch.rand(4096, HEAD_DIM, device="cuda")
    norms = torch.randn(2, HEAD_DIM, dtype=BF16, device="cuda")
    rotate = partial(
        rotate_and_write_kv,
        qkv,
        torch.randint(4096, (tokens,), device="cuda"),
        angles.cos(),
        angles.sin(),
        k_cache,
        v_cache,
        slots,
        q_norm=norms[0] if norm else None,
        k_norm=norms[1] if norm else None,
        eps=1e-6,
    )
    yield "rotate_and_write_kv", rotate, 4.0 * tokens * total * HEAD_DIM + 8.0 * tokens * HEAD_DIM


def time_row_kernels(report: Report) -> None:
    for model, shape in {"0.6B": (1024, 3072, 16, 8, True), "8B": (4096, 14336, 32, 8, False)}.items():
        for tokens in (1, 64, 256, 8192):
            by_kernel: dict[str, tuple[list[Call], float]] = {}
            for _ in range(2 if tokens == 8192 else 8):
                for kernel, call, size_bytes in row_kernel_calls(tokens, *shape):
                    by_kernel.setdefault(kernel, ([], size_bytes))[0].append(call)
            for kernel, (calls, size_bytes) in by_kernel.items():
                report.time(f"{kernel} {model} {tokens} tokens", calls, size_bytes)


def check_row_kernels(report: Report) -> None:
    x, residual = torch.randn(2, 77, 4096, dtype=BF16, device="cuda")
    weight = torch.randn(4096, dtype=BF16, device="cuda")
    exact = F.rms_norm(x.double(), (4096,), weight.double(), 1e-6)
    leave_nan(x.shape)
    report.check("rms_norm", relative_error(rms_norm(x, weight, 1e-6), exact), BF16_BOUND)
    expected_sum = x + residual
    exact = F.rms_norm(expected_sum.double(), (4096,), weight.double(), 1e-6)
    report.check("add_rms_norm", relative_error(add_rms_norm(x, residual, weight, 1e-6), exact), BF16_BOUND)
    report.check("add_rms_norm residual", relative_error(residual, expected_sum), 0.0)
    gate_up = torch.randn(77, 6144, dtype=BF16, device="cuda")
    gate, up = gate_up.double().chunk(2, 1)
    leave_nan(gate.shape)
    report.check("silu_and_mul", relative_error(silu_and_mul(gate_up), F.silu(gate) * up), BF16_BOUND)

    qkv = torch.randn(77, 32, HEAD_DIM, dtype=BF16, device="cuda")
    exact = qkv.double()
    norms = torch.randn(2, HEAD_DIM, dtype=BF16, device="cuda")
    angles = torch.rand(4096, HEAD_DIM // 2, device="cuda") * 6.28
    cos, sin = torch.cat((angles, angles), 1).cos(), torch.cat((-angles, angles), 1).sin()
    positions = torch.randint(4096, (77,), device="cuda")
    k_cache, v_cache = (
        torch.full((4, 8, BLOCK_SIZE, HEAD_DIM), torch.nan, dtype=BF16, device="cuda") for _ in range(2)
    )
    slots = torch.randperm(3 * BLOCK_SIZE, device="cuda")[:77] + BLOCK_SIZE
    q = rotate_and_write_kv(
        qkv, positions, cos, sin, k_cache, v_cache, slots, q_norm=norms[0], k_norm=norms[1], eps=1e-6
    )
    weights = norms.double().repeat_interleave(torch.tensor([16, 8], device="cuda"), 0)
    rotated = F.rms_norm(exact[:, :24], (HEAD_DIM,), None, 1e-6) * weights
    rotated = rotated * cos[positions, None].double() + rotated.roll(64, -1) * sin[positions, None].double()
    kept = k_cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE], v_cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE]
    report.check("rotate_and_write_kv q", relative_error(q, rotated[:, :16]), BF16_BOUND)
    report.check("rotate_and_write_kv k", relative_error(kept[0], rotated[:, 16:]), BF16_BOUND)
    report.check("rotate_and_write_kv v", relative_error(kept[1], exact[:, 24:]), 0.0)
    written = torch.full_like(k_cache, torch.nan), torch.full_like(v_cache, torch.nan)
    write_kv(kept[0], kept[1], *written, slots, BLOCK_SIZE)
    same = all(
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(written, (k_cache, v_cache), strict=True)
    )
    report.check("write_kv", 0.0 if same else 1.0, 0.0)


def check_linear(report: Report) -> None:
    """Against float64, and a row alone against the same row among others, over every tile that a token count picks."""
    for model, shapes in WEIGHT_SHAPES.items():
        for name, (n, k) in shapes.items():
            n = min(n, 32768)
            weight = torch.randn(n, k, dtype=BF16, device="cuda")
            x = torch.randn(600, k, dtype=BF16, device="cuda")
            leave_nan((600, n))
            together = linear(x, weight)
            report.check(
                f"linear {model} {name} 600 tokens",
                relative_error(together, x.double() @ weight.double().T),
                BF16_BOUND,
            )
            for tokens in (1, 16, 17, 33, 64, 128, 256, 257):
                leave_nan((tokens, n))
                part = linear(x[:tokens], weight)
                differing = float((part != together[:tokens]).double().mean())
                report.check(f"linear {model} {name} {tokens} of 600 tokens, differing", differing, 0.0)


def linear_calls(run: Callable[[Tensor, Tensor], Tensor], tokens: int, n: int, k: int) -> list[Call]:
    sets = sets_beyond_l2(2.0 * n * k)
    weights = [torch.randn(n, k, dtype=BF16, device="cuda") for _ in range(sets)]
    return [partial(run, torch.randn(tokens, k, dtype=BF16, device="cuda"), weight) for weight in weights]


def time_linear(report: Report) -> None:
    for model, shapes in WEIGHT_SHAPES.items():
        for name, (n, k) in shapes.items():
            for tokens in (1, 32, 64, 256, 8192):
                if name == "head" and tokens > 256:
                    continue
                library_us = rotating_us(linear_calls(F.linear, tokens, n, k))
                size_bytes = 2.0 * (n * k + tokens * (n + k))
                calls = linear_calls(linear, tokens, n, k)
                report.time(
                    f"linear {model} {name} {tokens} tokens", calls, size_bytes, 2.0 * tokens * n * k, library_us
                )


def sweep_linear(report: Report) -> None:
    for tokens, choices in {
        1: [(64, 16, 64, 4, 6), (64, 16, 128, 4, 5), (128, 16, 128, 4, 3), (128, 16, 64, 8, 5)],
        256: [
            (64, 256, 64, 4, 3),
            (128, 128, 64, 4, 4),
            (128, 128, 64, 8, 4),
            (128, 256, 64, 8, 3),
            (64, 64, 128, 4, 4),
        ],
        8192: [(128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (256, 128, 64, 8, 3)],
    }.items():
        for n, k in [(4096, 1024), (1024, 3072), (28672, 4096)]:
            for choice in choices:
                tiles = LinearTiles(*choice)
                calls = linear_calls(partial(linear, tiles=tiles), tokens, n, k)
                size_bytes = 2.0 * (n * k + tokens * (n + k))
                report.time(f"sweep linear {n}x{k} {tokens} tokens {choice}", calls, size_bytes, 2.0 * tokens * n * k)
            print(f"      (packaged: {tiles_for(tokens)})")


def check_sampler(report: Report) -> None:
    vocab, rows = 151936, 64
    logits = torch.randn(rows, vocab, dtype=BF16, device="cuda") * 2
    temperatures = torch.rand(rows, device="cuda") + 0.3
    temperatures[::4] = 0.0
    keys = noise_keys(list(range(rows)), [1000 + row for row in range(rows)], Purpose.TARGET).cuda()
    tokens, largest = choose_tokens(logits, temperatures, keys, vocab)
    noise = gumbel(noise_words(keys, torch.arange(vocab, device="cuda")))
    noisy = logits.float() / temperatures.clamp(min=1e-3)[:, None] + noise
    expected = torch.where((temperatures > 0)[:, None], noisy, logits.float()).argmax(1)
    greedy = temperatures == 0
    report.check("choose_tokens greedy, differing", float((tokens != logits.argmax(1))[greedy].double().mean()), 0.0)
    report.check("choose_tokens sampled, differing", float((tokens != expected)[~greedy].double().mean()), 0.0)
    report.check("choose_tokens largest", relative_error(largest, logits.float().amax(1)), 0.0)


def time_sampler(report: Report) -> None:
    vocab = 151936
    for rows in (1, 64, 256):
        for temperature in (0.0, 0.6):
            sets = sets_beyond_l2(2.0 * rows * vocab)
            keys = noise_keys(list(range(rows)), [5] * rows, Purpose.TARGET).cuda()
            warm = torch.full((rows,), temperature, device="cuda")
            calls: list[Call] = [
                partial(choose_tokens, torch.randn(rows, vocab, dtype=BF16, device="cuda"), warm, keys, vocab)
                for _ in range(sets)
            ]
            report.time(f"choose_tokens T={temperature} {rows} rows", calls, 2.0 * rows * vocab)


PARTS: dict[str, list[Callable[[Report], None]]] = {
    "rows": [check_row_kernels, time_row_kernels],
    "sampler": [check_sampler, time_sampler],
    "attention": [
        check_attention,
        check_long_prompts,
        check_attention_invariance,
        time_decode_attention,
        time_prefill_attention,
    ],
    "linear": [check_linear, time_linear],
}
SWEEPS: dict[str, Callable[[Report], None]] = {"attention": sweep_attention, "linear": sweep_linear}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON record goes")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to run, of {', '.join(PARTS)}")
    parser.add_argument("--sweep", action="store_true", help="also time other tiles than the packaged ones")
    args = parser.parse_args()
    seed = torch.seed()
    report = Report(measure_ceilings())
    print(f"{torch.cuda.get_device_name()}: {report.ceilings}", flush=True)
    for name in args.only.split(","):
        for part in [*PARTS[name], *([SWEEPS[name]] if args.sweep and name in SWEEPS else [])]:
            part(report)
            torch.cuda.empty_cache()
            write_record(args.out, "gpu_kernels", report.ceilings, {"sweep": args.sweep, "seed": seed}, report.rows)
    print(f"{report.failures} checks failed" if report.failures else "all checks passed")
    return min(report.failures, 1)


if __name__ == "__main__":
    sys.exit(main())
