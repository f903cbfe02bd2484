"""The C++ operators against float64, on every instruction set here, with one thread and with several."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.plan_driver import PlanDriver
from engine.attention.base import write_kv_by_index
from engine.cpu_ops.abi import LinearMode
from engine.cpu_ops.library import Library
from engine.cpu_ops.packing import GROUP, PackedWeight, pack, pack_bias, pack_int8
from engine.cpu_ops.program import quantized_width
from engine.layers.rope_settings import RopeSettings
from engine.layers.rotary import RotaryTables
from tests.support.cpp import INSTRUCTION_SETS, library_or_skip, on_instruction_set, poisoned, program, untouched
from tests.support.loading import load
from tests.support.paged import PagedCase, attend_in_float64, paged_case
from tests.support.tiny_models import write_tiny_llama

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((1, 1), (7, 3), (33, 64), (96, 65), (260, 100))
ROWS = (1, 2, 13, 15, 29, 130)
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(params=INSTRUCTION_SETS)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    with on_instruction_set(request.param) as chosen:
        yield chosen


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(
    library: Library,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    mode: LinearMode = LinearMode.STORE,
    before: Tensor | None = None,
    threads: int = 1,
) -> Tensor:
    """Return the result for x [rows, in] in buffers between NaN; `before` is what ADD adds to."""
    paired = mode == LinearMode.SILU_MUL
    jobs = program(library, 2, threads)
    packed = pack(weight, library.lanes, paired=paired)
    packed_bias = None if bias is None else pack_bias(bias, library.lanes, paired=paired)
    jobs.linear(0, 1, packed, packed_bias, mode)
    width = len(weight) // 2 if paired else len(weight)
    target = poisoned(torch.full((len(x), width), torch.nan) if before is None else before)
    jobs.run(len(x), {0: poisoned(x), 1: target})
    assert untouched(target)
    return target


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_weight_has_its_values(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = random(*shape, dtype=dtype)
    for lanes in (4, 8, 16):
        assert torch.equal(pack(weight, lanes).values(), weight)
        if shape[0] % 2 == 0:
            assert torch.equal(pack(weight, lanes, paired=True).values(), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_float64(library: Library, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = random(*shape, dtype=dtype), random(shape[0], seed=1, dtype=dtype)
    for rows in ROWS:
        x = random(rows, shape[1], seed=rows)
        exact = F.linear(x.double(), weight.double())
        close = {"rtol": 1e-5, "atol": 1e-5 * shape[1] ** 0.5}
        torch.testing.assert_close(linear(library, x, weight).double(), exact, **close)
        found = linear(library, x, weight, bias, mode=LinearMode.ADD, before=exact.float(), threads=3)
        torch.testing.assert_close(found.double(), 2 * exact + bias.double(), **close)
        if shape[0] % 2 == 0:
            gate, up = (exact + bias.double()).chunk(2, dim=-1)
            found = linear(library, x, weight, bias, mode=LinearMode.SILU_MUL, threads=2)
            torch.testing.assert_close(found.double(), F.silu(gate) * up, **close)


def int8_linear(library: Library, x: Tensor, packed: PackedWeight, bias: Tensor | None, threads: int = 1) -> Tensor:
    """Return the result, and halves of it multiplied where the weight is paired."""
    jobs = program(library, 3, threads)
    jobs.quantize(0, 2, packed.inputs)
    mode = LinearMode.SILU_MUL if packed.paired else LinearMode.STORE
    packed_bias = None if bias is None else pack_bias(bias, library.lanes, paired=packed.paired)
    jobs.linear(2, 1, packed, packed_bias, mode)
    quantized, target = (
        poisoned(torch.full((len(x), width), torch.nan))
        for width in (quantized_width(packed.inputs), packed.outputs // (2 if packed.paired else 1))
    )
    jobs.run(len(x), {0: poisoned(x), 1: target, 2: quantized})
    assert untouched(target)
    assert untouched(quantized)
    return target


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (34, 64), (96, 65), (260, 200)])
def test_products_in_8_bits_are_those_of_the_rounded_factors(library: Library, shape: tuple[int, int]) -> None:
    """Rounded by torch in the same groups, the product in float64."""
    bias = random(shape[0], seed=1)
    packed = pack_int8(random(*shape), library.lanes)
    weight = packed.values()
    torch.testing.assert_close(weight, random(*shape), rtol=0, atol=5 / 254)
    for rows in (1, 2, 7, 13, 64):
        x = random(rows, shape[1], seed=rows)
        padded = F.pad(x, (0, -shape[1] % GROUP)).view(rows, -1, GROUP)
        scale = padded.abs().amax(dim=2, keepdim=True) / 127
        rounded = ((padded / scale).nan_to_num().round() * scale).flatten(1)[:, : shape[1]]
        exact = F.linear(rounded.double(), weight.double(), bias.double())
        found = int8_linear(library, x, packed, bias, threads=2)
        # A value that lies between two bytes may go either way.
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0.02)
        assert (found - exact).abs().mean() < 1e-3
        if shape[0] % 2 == 0:
            paired = pack_int8(random(*shape), library.lanes, paired=True)
            assert torch.equal(paired.values(), weight)
            gate, up = int8_linear(library, x, packed, bias).double().chunk(2, dim=-1)
            found = int8_linear(library, x, paired, bias).double()
            torch.testing.assert_close(found, F.silu(gate) * up, rtol=1e-5, atol=1e-5)


def test_rows_in_8_bits_are_apart_and_show_what_is_not_finite(library: Library) -> None:
    packed, x = pack_int8(random(50, 100), library.lanes), random(40, 100, seed=1)
    whole = int8_linear(library, x, packed, None)
    for first, count in ((0, 1), (3, 7), (39, 1)):
        assert torch.equal(int8_linear(library, x[first : first + count], packed, None), whole[first : first + count])
    for row, bad in ((3, torch.nan), (17, torch.inf), (20, -torch.inf)):
        x[row, 70] = bad
    x[30] = 0
    found = int8_linear(library, x, packed, None)
    assert bool(found[[3, 17, 20]].isnan().all())
    assert not found[30].any()
    others = [row for row in range(40) if row not in (3, 17, 20, 30)]
    assert torch.equal(found[others], whole[others])


@pytest.mark.parametrize("mode", [LinearMode.STORE, LinearMode.SILU_MUL])
def test_a_row_does_not_depend_on_its_neighbours_or_on_the_threads(library: Library, mode: LinearMode) -> None:
    x, weight = random(150, 100) * 3, random(96, 100, seed=1, dtype=torch.bfloat16)
    whole = linear(library, x, weight, mode=mode)
    for count in (1, 2, 5, 14, 16, 33, 120):
        for first in (0, 7, 150 - count):
            part = linear(library, x[first : first + count], weight, mode=mode, threads=1 + count % 3)
            assert torch.equal(part, whole[first : first + count]), (count, first)


def test_one_rows_nan_stays_its_own(library: Library) -> None:
    x, weight = random(30, 40), random(50, 40, seed=1)
    expected = linear(library, x, weight)
    x[17, 3] = torch.nan
    found = linear(library, x, weight)
    assert bool(found[17].isnan().all())
    others = torch.arange(30) != 17
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("size", [1, 3, 64, 100])
def test_norm_and_embedding(library: Library, size: int) -> None:
    table, weight = random(11, size, dtype=torch.bfloat16) * 3, random(size, seed=1)
    ids = torch.tensor([3, 10, 0, 3, 7])
    jobs = program(library, 2, threads=2)
    jobs.embed(0, table)
    jobs.norm(0, 1, weight, 1e-5)
    rows, normed = (poisoned(torch.full((5, size), torch.nan)) for _ in range(2))
    jobs.run(5, {0: rows, 1: normed}, token_ids=ids)
    assert torch.equal(rows, table[ids].float())
    exact = F.rms_norm(table[ids].double(), (size,), weight.double(), 1e-5)
    torch.testing.assert_close(normed.double(), exact, rtol=1e-5, atol=1e-6)
    assert untouched(rows)
    assert untouched(normed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [False, True])
def test_heads_are_rotated_and_written_as_by_torch(library: Library, dtype: torch.dtype, with_norms: bool) -> None:
    heads, kv_heads, size = 6, 2, 20
    case = paged_case(
        (1, 17, 2), (70, 17, 100), block_size=16, heads=heads, kv_heads=kv_heads, head_dim=size, device=CPU, dtype=dtype
    )
    tables = RotaryTables(size, 100, RopeSettings(10000.0), CPU)
    qkv = random(20, heads + 2 * kv_heads, size)
    norms = (random(size, seed=1), random(size, seed=2)) if with_norms else None
    caches = (torch.zeros_like(case.k_cache), torch.zeros_like(case.v_cache))
    expected = tuple(torch.zeros_like(cache) for cache in caches)
    query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        query, key = (F.rms_norm(x, (size,), norm, 1e-6) for x, norm in zip((query, key), norms, strict=True))
    query, key = (tables.rotate(x, *tables.at(case.batch.positions)) for x in (query, key))
    write_kv_by_index(key.to(dtype), value.to(dtype), *expected, case.batch)

    jobs = program(library, 1, threads=3)
    jobs.rotate_and_write(0, (heads, kv_heads, size), (tables.cos, tables.sin), layer=0, group=0, norms=norms, eps=1e-6)
    buffer = poisoned(qkv.flatten(1))
    jobs.run(20, {0: buffer}, batches=(case.batch,), caches=(caches,))
    torch.testing.assert_close(buffer[:, : heads * size], query.flatten(1), rtol=1e-5, atol=1e-5)
    for cache, written in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache, written, rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-5)
        assert torch.equal(cache == 0, written == 0)
    assert torch.equal(caches[1], expected[1])
    assert untouched(buffer)


BATCHES = {
    "decode": ((1, 1, 1, 1, 1), (1, 16, 17, 190, 33)),
    "prefill": ((5, 40, 16), (5, 40, 16)),
    "mixed": ((1, 17, 1, 2, 33), (70, 17, 5, 130, 200)),
}
GRIDS = ((6, 2, 32), (4, 4, 20), (5, 1, 80))


def attend(
    library: Library, case: PagedCase, caches: tuple[Tensor, Tensor], window: int | None, threads: int = 1
) -> Tensor:
    """Return [tokens, heads, head_dim]; the queries are the first part of wider rows, as a step's are."""
    tokens, heads, size = case.query.shape
    jobs = program(library, 2, threads)
    jobs.attend(0, 1, (heads, caches[0].shape[1], size), layer=0, group=0, scale=0.2, window=window)
    target = poisoned(torch.full((tokens, heads * size), torch.nan))
    jobs.run(tokens, {0: poisoned(case.query.flatten(1)), 1: target}, batches=(case.batch,), caches=(caches,))
    assert untouched(target)
    return target.reshape(tokens, heads, size)


def attention_case(batch: str, grid: tuple[int, int, int], block_size: int, dtype: torch.dtype) -> PagedCase:
    """Slots that no token has written are NaN."""
    torch.manual_seed(1)
    heads, kv_heads, size = grid
    query_lens, kv_lens = BATCHES[batch]
    return paged_case(
        query_lens,
        kv_lens,
        block_size=block_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
        device=CPU,
        dtype=dtype,
        spare_blocks=1,
    )


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_is_one_softmax_per_row(library: Library, batch: str, window: int | None) -> None:
    for grid, block_size, dtype in zip(
        GRIDS, (16, 64, 128), (torch.float32, torch.bfloat16, torch.float32), strict=True
    ):
        case = attention_case(batch, grid, block_size, dtype)
        found = attend(library, case, (case.k_cache, case.v_cache), window, threads=2)
        exact = attend_in_float64(case, scale=0.2, window_tokens=window)
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-5)


@pytest.mark.parametrize("window", [1, 18, 40])
def test_blocks_behind_a_window_may_be_anybodys(library: Library, window: int) -> None:
    case = attention_case("mixed", (6, 2, 32), 16, torch.float32)
    exact = attend_in_float64(case, scale=0.2, window_tokens=window)
    spoilt = len(case.k_cache)
    caches = tuple(torch.cat((cache, torch.full_like(cache[:1], torch.nan))) for cache in (case.k_cache, case.v_cache))
    for row, (queries, end) in enumerate(zip(case.batch.host_query_lens, case.batch.host_kv_lens, strict=True)):
        case.batch.block_tables[row, : max(0, end - queries - window + 1) // 16] = spoilt
    assert bool((case.batch.block_tables == spoilt).any())
    found = attend(library, case, (caches[0], caches[1]), window)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-5)


def test_many_threads_run_many_short_lists_of_jobs() -> None:
    """More threads than cores, so that they do fall asleep between and within lists."""
    library = library_or_skip()
    x, weight = random(3, 64), random(200, 64, seed=1)
    expected = linear(library, x, weight)
    packed = pack(weight, library.lanes)
    jobs = program(library, 4, threads=5)
    for target in (1, 2, 3):
        jobs.linear(0, target, packed, None)
    for _ in range(200):
        targets = {target: torch.full((3, 200), torch.nan) for target in (1, 2, 3)}
        jobs.run(3, {0: x, **targets})
        assert all(torch.equal(target, expected) for target in targets.values())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_starts_a_team_of_its_own() -> None:
    library = library_or_skip()
    code = (
        "import os, sys, torch; from engine.cpu_ops.library import load_library;"
        "from tests.engine.test_cpu_ops import linear, random;"
        "library = load_library(); x, w = random(3, 64), random(200, 64, seed=1);"
        "expected = linear(library, x, w, threads=2); pid = os.fork();"
        "same = torch.equal(linear(library, x, w, threads=2), expected);"
        "pid or os._exit(0 if same else 3); code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]);"
        "sys.exit(code or (0 if same else 4))"
    )
    assert library.lanes
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_in_jobs_gives_torchs_logits_and_names_its_weights(tmp_path: Path, tied: bool, dtype: str) -> None:
    library_or_skip()
    shape = {"hidden_size": 72, "heads": 6, "kv_heads": 3, "intermediate_size": 100}
    write_tiny_llama(tmp_path, **shape, tied=tied, attention_bias=True, mlp_bias=True)  # type: ignore[arg-type]
    plain, in_jobs = load(tmp_path, operators="torch"), load(tmp_path, dtype, operators="cpp")
    tokens = torch.randint(10, 200, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = PlanDriver(plain, num_blocks=8, block_size=16).all_logits(tokens, 40)
    for chunk in (40, 7):
        found = PlanDriver(in_jobs, num_blocks=8, block_size=16).all_logits(tokens, chunk)
        assert found.dtype == torch.float32
        error = (found - expected).abs().max() / expected.abs().max()
        assert error < (1e-5 if dtype == "float32" else 0.03), chunk
    again = load(tmp_path, dtype, operators="torch")
    for (name, values), (same_name, same_values) in zip(
        in_jobs.module.named_parts(), again.module.named_parts(), strict=True
    ):
        assert name == same_name
        assert torch.equal(values, same_values), name
