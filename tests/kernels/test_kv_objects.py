from __future__ import annotations

import pytest
import torch

from engine.kernels.kv_objects import pack_chunks, unpack_chunks


def _addresses(cache: torch.Tensor, places: list[int | None], chunk_bytes: int) -> torch.Tensor:
    starts = [0 if place is None else cache.data_ptr() + place * chunk_bytes for place in places]
    return torch.tensor(starts, dtype=torch.int64, device=cache.device)


@pytest.mark.parametrize("chunk_bytes", [128, 16384, 24576 + 16])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32])
def test_chunks_are_packed_in_order(device: torch.device, dtype: torch.dtype, chunk_bytes: int) -> None:
    cache = torch.randint(256, (5, chunk_bytes), dtype=torch.uint8, device=device).view(dtype)
    packed = torch.full((3 * chunk_bytes,), 7, dtype=torch.uint8, device=device)
    pack_chunks(packed, _addresses(cache, [4, None, 1], chunk_bytes), chunk_bytes)
    chunks = cache.view(torch.uint8)
    expected = torch.stack([chunks[4], torch.zeros_like(chunks[0]), chunks[1]])
    assert torch.equal(packed.view(3, chunk_bytes), expected)


@pytest.mark.parametrize("chunk_bytes", [128, 16384, 24576 + 16])
def test_unpacking_fills_the_places_and_nothing_else(device: torch.device, chunk_bytes: int) -> None:
    cache = torch.full((5, chunk_bytes), 7, dtype=torch.uint8, device=device)
    packed = torch.randint(256, (3 * chunk_bytes,), dtype=torch.uint8, device=device)
    unpack_chunks(packed, _addresses(cache, [4, None, 1], chunk_bytes), chunk_bytes)
    expected = torch.full_like(cache, 7)
    expected[4], expected[1] = packed.view(3, chunk_bytes)[0], packed.view(3, chunk_bytes)[2]
    assert torch.equal(cache, expected)
