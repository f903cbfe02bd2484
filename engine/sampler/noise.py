"""Counter noise: a random number is a hash of (seed, position, purpose, token id), never a generator's state.

It owns the hash and its turn into uniform and Gumbel numbers; it does not know logits or slots.

All arithmetic is on 32-bit words with wraparound, so the CPU, CUDA and a Triton kernel give the same integers:

    mix(x)      x ^= x >> 16;  x *= 0x21f0aaad;  x ^= x >> 15;  x *= 0xd35a2d97;  x ^= x >> 15
    key         low  = mix(mix(mix(seed_lo ^ 0x9e3779b9) ^ seed_hi) ^ counter)
                high = mix(mix(mix(seed_hi ^ 0x85ebca77) ^ seed_lo) ^ counter),  counter = position * 4 + purpose
    word(token) mix(mix(token) ^ low) ^ high

`mix` is the two-round xorshift-multiply permutation of Chris Wellons' hash-prospector with the best constants known
for its form (exact avalanche bias 0.108, the finaliser of MurmurHash3 has 0.23). The key whitens it before and after
(an Even-Mansour construction), so the words of one key are distinct, and two keys share structure only when they
collide in all 64 bits. Against an adversary that is far weaker than Philox4x32-10, and a third of its work; here it
feeds an argmax over a vocabulary, and the chi-square tests beside this package cannot tell it from random. `mix(token)`
does not depend on the key: on torch it is a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Purpose(IntEnum):
    """What a number is drawn for. Numbers of one (seed, position) with different purposes are independent."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


_WORD = 0xFFFFFFFF
_LOW_SALT = 0x9E3779B9
_HIGH_SALT = 0x85EBCA77
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def noise_keys(seeds: Sequence[int], positions: Sequence[int], purpose: Purpose) -> Tensor:
    """Return int32 [rows, 2] on the CPU: the key of each row. Seeds count modulo 2^64, positions modulo 2^30."""
    low = np.array([seed & _WORD for seed in seeds], dtype=np.uint32)
    high = np.array([(seed >> 32) & _WORD for seed in seeds], dtype=np.uint32)
    counter = np.array([(position * 4 + purpose) & _WORD for position in positions], dtype=np.uint32)
    first = _mix_words(_mix_words(_mix_words(low ^ np.uint32(_LOW_SALT)) ^ high) ^ counter)
    second = _mix_words(_mix_words(_mix_words(high ^ np.uint32(_HIGH_SALT)) ^ low) ^ counter)
    return torch.from_numpy(np.stack((first, second), axis=1).view(np.int32))


def noise_words(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return 31 random bits each as int32: [rows, n] of keys [rows, 2] and token ids [n] or [rows, n]."""
    words = mix(token_ids.to(torch.int32)) ^ keys[:, :1]
    return _finish_words(words, torch.empty_like(words), keys)


def uniform(words: Tensor) -> Tensor:
    """Return float32 in [2^-32, 1 - 2^-24], (word + 1/2) / 2^31: small values are exact, large ones have 24 bits."""
    return _to_negative_uniform(words.to(torch.float32)).neg_()


def gumbel(words: Tensor) -> Tensor:
    """Return float32 standard Gumbel numbers, -log(-log(1 - u)) with u = `uniform`, in [-2.82, 22.19].

    A token of probability p wins when its exponential number -log(1 - u) falls below about p, so what matters is how
    fine the smallest numbers are. Taking them from 1 - u with u near 0 keeps all 31 bits there: their grain is 2^-31,
    and at most vocabulary * 2^-31 of a distribution's mass is misplaced, 7e-5 at 150,000 entries. A 24-bit uniform
    near 1 clips at 16.6 and loses every token below 3e-8, together up to half a percent.
    """
    return _to_gumbel(words.to(torch.float32))


class VocabNoise:
    """Gumbel noise of every token of a vocabulary, a few rows at a time, in buffers that it keeps: on the CPU the page
    faults of fresh memory cost more than the arithmetic. Keep `max_rows` small enough for the cache.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self._mixed_ids = mix(torch.arange(vocab_size, dtype=torch.int32, device=device))
        self._words = torch.empty((max_rows, vocab_size), dtype=torch.int32, device=device)
        self._numbers = torch.empty((max_rows, vocab_size), dtype=torch.float32, device=device)

    def gumbel(self, keys: Tensor) -> Tensor:
        """Return float32 [rows, vocab] of keys [rows, 2], valid until the next call."""
        words, numbers = self._words[: len(keys)], self._numbers[: len(keys)]
        torch.bitwise_xor(self._mixed_ids, keys[:, :1], out=words)
        _finish_words(words, numbers.view(torch.int32), keys)
        return _to_gumbel(numbers.copy_(words))


def mix(words: Tensor) -> Tensor:
    """The permutation of 32-bit words above, of an int32 tensor (which it leaves as it is)."""
    return _mix_in_place(words.clone(), torch.empty_like(words))


def _finish_words(words: Tensor, scratch: Tensor, keys: Tensor) -> Tensor:
    # The sign bit is dropped so that the conversion to float32 is precise near 0.
    return _mix_in_place(words, scratch).bitwise_xor_(keys[:, 1:]).bitwise_and_(0x7FFFFFFF)


def _mix_in_place(words: Tensor, scratch: Tensor) -> Tensor:
    # `>>` of int32 copies the sign: the mask makes it a shift of unsigned words.
    torch.bitwise_right_shift(words, 16, out=scratch)
    words.bitwise_xor_(scratch.bitwise_and_(0xFFFF)).mul_(0x21F0AAAD)
    torch.bitwise_right_shift(words, 15, out=scratch)
    words.bitwise_xor_(scratch.bitwise_and_(0x1FFFF)).mul_(_signed(0xD35A2D97))
    torch.bitwise_right_shift(words, 15, out=scratch)
    return words.bitwise_xor_(scratch.bitwise_and_(0x1FFFF))


def _to_gumbel(words: Tensor) -> Tensor:
    return _to_negative_uniform(words).log1p_().neg_().log_().neg_()


def _to_negative_uniform(words: Tensor) -> Tensor:
    # In place, and exact but for the sum: the factor is a power of two. Not `uniform`'s negation: it saves a pass.
    return words.add_(0.5).mul_(-(2.0**-31)).clamp_(min=-_LARGEST_BELOW_ONE)


def _mix_words(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """`mix` for a few words on the host: numpy starts an operator sooner than torch does."""
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    words = (words ^ (words >> np.uint32(15))) * np.uint32(0xD35A2D97)
    return words ^ (words >> np.uint32(15))


def _signed(word: int) -> int:
    return word - 0x100000000 if word & 0x80000000 else word
