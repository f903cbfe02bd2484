"""The counter hash: its integers against a twin in plain Python, its statistics by chi-square with fixed seeds."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from engine.sampler.noise import Purpose, VocabNoise, gumbel, mix, noise_keys, noise_words, uniform

WORD = 0xFFFFFFFF


def mix_twin(word: int) -> int:
    word ^= word >> 16
    word = word * 0x21F0AAAD & WORD
    word ^= word >> 15
    word = word * 0xD35A2D97 & WORD
    return word ^ word >> 15


def word_twin(seed: int, position: int, purpose: int, token: int) -> int:
    low, high, counter = seed & WORD, seed >> 32 & WORD, (position * 4 + purpose) & WORD
    first = mix_twin(mix_twin(mix_twin(low ^ 0x9E3779B9) ^ high) ^ counter)
    second = mix_twin(mix_twin(mix_twin(high ^ 0x85EBCA77) ^ low) ^ counter)
    return (mix_twin(mix_twin(token) ^ first) ^ second) & 0x7FFFFFFF


def vocab_words(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return noise_words(keys, torch.arange(vocab_size))


def as_int32(word: int) -> int:
    return word - 2**32 if word >> 31 else word


def chi_square_z(counts: np.ndarray) -> float:
    """Chi-square of equal expectations as a standard normal deviate (Wilson-Hilferty)."""
    expected = counts.sum() / counts.size
    assert expected >= 5, "too few samples for the test"
    dof = counts.size - 1
    chi = float(((counts - expected) ** 2 / expected).sum())
    return ((chi / dof) ** (1 / 3) - (1 - 2 / (9 * dof))) / math.sqrt(2 / (9 * dof))


def words_grid(seeds: range, positions: range, tokens: int, purpose: Purpose = Purpose.TARGET) -> np.ndarray:
    """[seeds, positions, tokens]"""
    pairs = [(seed, position) for seed in seeds for position in positions]
    keys = noise_keys([seed for seed, _ in pairs], [position for _, position in pairs], purpose)
    return vocab_words(keys, tokens).numpy().reshape(len(seeds), len(positions), tokens)


def test_mix_equals_its_twin_in_every_vector_lane() -> None:
    generator = random.Random(1)
    words = [0, 1, WORD, 0x80000000, *(generator.getrandbits(32) for _ in range(1021))]
    tensor = torch.tensor([as_int32(word) for word in words], dtype=torch.int32)
    assert [value & WORD for value in mix(tensor).tolist()] == [mix_twin(word) for word in words]
    assert tensor.tolist() == [as_int32(word) for word in words]


def test_mix_is_a_permutation_with_avalanche() -> None:
    words = torch.arange(2**13, dtype=torch.int32)
    mixed = mix(words)
    assert len(mixed.unique()) == len(words)
    for bit in range(32):
        flipped = mix(words ^ as_int32(1 << bit)) ^ mixed
        for out in range(32):
            share = (flipped >> out & 1).float().mean().item()
            assert abs(share - 0.5) < 0.03, (bit, out)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF0])
def test_words_equal_their_twin(seed: int) -> None:
    positions = [0, 1, 77, 131072]
    tokens = [0, 1, 2, 49151, 151935]
    for purpose in Purpose:
        words = noise_words(noise_keys([seed] * len(positions), positions, purpose), torch.tensor(tokens))
        assert words.tolist() == [[word_twin(seed, at, purpose, token) for token in tokens] for at in positions]


def test_words_of_chosen_ids_equal_those_of_the_whole_vocabulary() -> None:
    keys = noise_keys([3, 4, 5], [10, 11, 12], Purpose.TARGET)
    ids = torch.tensor([[5, 999, 0], [1, 1, 2], [512, 7, 300]])
    whole = vocab_words(keys, 1000)
    assert torch.equal(noise_words(keys, ids), whole.gather(1, ids))
    assert torch.equal(vocab_words(keys[1:2], 1000)[0], whole[1])


def test_noise_of_a_vocabulary_does_not_depend_on_threads_or_neighbours() -> None:
    keys = noise_keys(list(range(33)), list(range(33)), Purpose.TARGET)
    whole = gumbel(vocab_words(keys, 49157))
    noise = VocabNoise(49157, 8, torch.device("cpu"))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in (slice(0, 1), slice(17, 18), slice(5, 12), slice(25, 33)):
                assert torch.equal(noise.gumbel(keys[rows]), whole[rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shift", [0, 4, 11, 15, 23])
def test_bytes_of_words_are_uniform(shift: int) -> None:
    words = words_grid(range(8), range(64), 1024)
    assert abs(chi_square_z(np.bincount((words >> shift & 0xFF).ravel(), minlength=256))) < 4


@pytest.mark.parametrize("step", [1, 2, 3, 64])
@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_words_of_near_counters_are_independent(axis: str, step: int) -> None:
    """Pairs (word, word of the counter `step` further) fill a square of 32 x 32 evenly, by high and by low bits."""
    shapes = {"seed": (range(512), range(4), 256), "position": (range(4), range(512), 256)}
    words = words_grid(*shapes.get(axis, (range(16), range(16), 2048)))
    words = np.moveaxis(words, ("seed", "position", "token").index(axis), 0)
    for shift in (26, 13, 0):
        first, second = words[:-step] >> shift & 31, words[step:] >> shift & 31
        assert abs(chi_square_z(np.bincount((first * 32 + second).ravel(), minlength=1024))) < 4, shift


def test_purposes_are_independent() -> None:
    grids = [words_grid(range(4), range(256), 256, purpose) >> 26 for purpose in Purpose]
    for first in range(len(grids)):
        for second in range(first):
            pairs = np.bincount((grids[first] * 32 + grids[second]).ravel(), minlength=1024)
            assert abs(chi_square_z(pairs)) < 4


def test_seeds_differing_in_the_upper_half_only_are_independent() -> None:
    positions = list(range(256))
    low = vocab_words(noise_keys([7] * 256, positions, Purpose.TARGET), 256).numpy() >> 26
    high = vocab_words(noise_keys([7 + 2**32] * 256, positions, Purpose.TARGET), 256).numpy() >> 26
    assert abs(chi_square_z(np.bincount((low * 32 + high).ravel(), minlength=1024))) < 4


def test_uniform_stays_inside_the_open_interval_and_is_fine_near_zero() -> None:
    edges = uniform(torch.tensor([0, 1, 2**30, 2**31 - 1], dtype=torch.int32))
    assert edges.tolist() == [2.0**-32, 3 * 2.0**-32, 0.5, 1 - 2.0**-24]


def test_gumbel_is_finite_and_reaches_beyond_24_bits() -> None:
    numbers = gumbel(torch.tensor([0, 2**31 - 1], dtype=torch.int32))
    assert torch.isfinite(numbers).all()
    assert numbers[0].item() == pytest.approx(32 * math.log(2), abs=1e-5)
    assert numbers[1].item() == pytest.approx(-math.log(24 * math.log(2)), abs=1e-4)


def test_gumbel_has_the_moments_and_the_tail_of_its_law() -> None:
    words = words_grid(range(4), range(64), 8192)
    numbers = gumbel(torch.from_numpy(words)).double()
    count = numbers.numel()
    assert numbers.mean().item() == pytest.approx(0.5772157, abs=5 * 1.2825 / math.sqrt(count))
    assert numbers.var().item() == pytest.approx(math.pi**2 / 6, rel=0.01)
    for level in (2.0, 5.0, 8.0, 10.0):
        expected = count * -math.expm1(-math.exp(-level))
        assert abs((numbers > level).sum().item() - expected) < 5 * math.sqrt(expected)
