from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.sampling import _gumbel, _mix, choose_tokens
from engine.sampler.noise import Purpose, gumbel, mix, noise_keys, noise_words

VOCAB = 9000


@triton.jit
def _hash_kernel(words, numbers, ids, key_low, key_high, SIZE: tl.constexpr) -> None:  # noqa: ANN001
    lane = tl.arange(0, SIZE)
    token = tl.load(ids + lane).to(tl.uint32, bitcast=True)
    tl.store(words + lane, _mix(token).to(tl.int32, bitcast=True))
    low = tl.load(key_low).to(tl.uint32, bitcast=True)
    high = tl.load(key_high).to(tl.uint32, bitcast=True)
    tl.store(numbers + lane, _gumbel(token, low, high))


def test_hash_and_noise_are_the_samplers(device: torch.device) -> None:
    ids = torch.randint(-(2**31), 2**31, (1024,), dtype=torch.int64).to(torch.int32).to(device)
    keys = noise_keys([2**63 + 12345], [1_000_003], Purpose.TARGET).to(device)
    words, numbers = torch.empty_like(ids), torch.empty(1024, device=device)
    _hash_kernel[(1,)](words, numbers, ids, keys[0, 0:], keys[0, 1:], SIZE=1024)
    assert torch.equal(words, mix(ids))
    torch.testing.assert_close(numbers, gumbel(noise_words(keys, ids))[0], rtol=2e-6, atol=2e-6)


def test_ends_of_the_noise_are_the_samplers(device: torch.device) -> None:
    """The smallest and the largest word of many: where log1p would lose its precision, and where the clamp acts."""
    keys = noise_keys([7], [9], Purpose.TARGET).to(device)
    ids = torch.arange(1 << 16, dtype=torch.int32, device=device)
    words = noise_words(keys, ids)[0]
    extreme = ids[torch.stack((words.argmin(), words.argmax()))].repeat(8)
    out, numbers = torch.empty_like(extreme), torch.empty(16, device=device)
    _hash_kernel[(1,)](out, numbers, extreme, keys[0, 0:], keys[0, 1:], SIZE=16)
    torch.testing.assert_close(numbers, gumbel(noise_words(keys, extreme))[0], rtol=2e-6, atol=2e-6)


def expected_tokens(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    logits = logits[:, :VOCAB].float()
    noisy = logits / temperatures.clamp(min=1e-9)[:, None] + gumbel(
        noise_words(keys, torch.arange(VOCAB, device=logits.device))
    )
    return torch.where((temperatures > 0)[:, None], noisy, logits).argmax(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_greedy_and_sampled_rows(device: torch.device, dtype: torch.dtype) -> None:
    logits = (torch.randn(6, VOCAB + 56, device=device) * 3).to(dtype)
    logits[:, VOCAB:] = 100.0  # padding of the vocabulary must not win
    temperatures = torch.tensor([0.0, 1.0, 0.6, 2.0, 0.0, 1e-3], device=device)
    keys = noise_keys([1, 2, 3, 4, 5, 6], [10, 10, 11, 12, 0, 7], Purpose.TARGET).to(device)
    tokens, largest = choose_tokens(logits, temperatures, keys, VOCAB)
    assert torch.equal(tokens, expected_tokens(logits, temperatures, keys))
    assert torch.equal(largest, logits[:, :VOCAB].amax(1).float())
    again, _ = choose_tokens(logits.flip(0), temperatures.flip(0), keys.flip(0), VOCAB)
    assert torch.equal(again.flip(0), tokens)


def test_ties_go_to_the_lowest_id(device: torch.device) -> None:
    logits = torch.zeros(2, VOCAB, device=device)
    logits[1, [8999, 4097, 4096, 5000]] = 1.0
    keys = torch.zeros(2, 2, dtype=torch.int32, device=device)
    tokens, _ = choose_tokens(logits, torch.zeros(2, device=device), keys, VOCAB)
    assert tokens.tolist() == [0, 4096]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_show_in_the_largest(device: torch.device, value: float) -> None:
    logits = torch.randn(3, VOCAB, device=device)
    logits[1, 5000] = value
    logits[2] = -torch.inf
    keys = noise_keys([1, 2, 3], [1, 1, 1], Purpose.TARGET).to(device)
    tokens, largest = choose_tokens(logits, torch.ones(3, device=device), keys, VOCAB)
    assert largest.isfinite().tolist() == [True, False, False]
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
