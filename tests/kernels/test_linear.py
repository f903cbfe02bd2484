from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.kernels import linear as kernel
from engine.kernels.linear import LinearTiles, k_chunks, linear

SMALL = LinearTiles(tile_n=64, tile_t=16, tile_k=64, warps=4, stages=2)


@pytest.mark.parametrize(("n", "k", "chunks"), [(4096, 1024, 4), (1024, 2048, 8), (28672, 4096, 1), (151936, 1024, 1)])
def test_narrow_weights_get_more_chunks(n: int, k: int, chunks: int) -> None:
    assert k_chunks(n, k) == chunks


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_torchs(device: torch.device, tokens: int, bias: bool) -> None:
    x, weight = torch.randn(tokens, 530, device=device), torch.randn(100, 530, device=device)
    b = torch.randn(100, device=device) if bias else None
    assert k_chunks(100, 530) == 2
    torch.testing.assert_close(linear(x, weight, b), F.linear(x, weight, b), rtol=1e-4, atol=1e-4)


def test_strided_rows_in_half_precision(device: torch.device) -> None:
    wide, weight = torch.randn(6, 400, device=device).half(), torch.randn(70, 256, device=device).half()
    x = wide[:, 100:356]
    expected = F.linear(x.double(), weight.double())
    error = (linear(x, weight).double() - expected).norm() / expected.norm()
    assert error < 1e-3


def test_chunks_side_by_side_and_in_one_program_give_the_same_bits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = torch.randn(20, 1024, device=device), torch.randn(128, 1024, device=device)
    assert k_chunks(128, 1024) == 4
    side_by_side = linear(x, weight, tiles=SMALL)
    again = linear(x, weight, tiles=SMALL)
    chunks = k_chunks(128, 1024)
    monkeypatch.setattr(kernel, "_TARGET_PROGRAMS", 0)
    monkeypatch.setattr(kernel, "k_chunks", lambda n, k: chunks)
    in_one_program = linear(x, weight, tiles=SMALL)
    assert torch.equal(side_by_side, again)
    assert torch.equal(side_by_side, in_one_program)


def test_a_tokens_result_does_not_depend_on_the_others(device: torch.device) -> None:
    x, weight = torch.randn(40, 600, device=device), torch.randn(64, 600, device=device)
    together = linear(x, weight, tiles=SMALL)
    for tokens in (1, 7, 17):
        assert torch.equal(linear(x[:tokens], weight, tiles=SMALL), together[:tokens])
    assert torch.equal(linear(x.flip(0), weight, tiles=SMALL).flip(0), together)
