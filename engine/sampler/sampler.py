"""Chooses a token for each row of logits. Owns the sampling parameters of the slots; knows no requests and no blocks.

A row's token depends on its logits, its slot's parameters, the position and, with penalties or bad words, on the slot's
tokens so far. Rows are of three kinds, each paying only for itself: greedy (argmax), plain (temperature, perhaps min_p:
argmax of logits / T + Gumbel noise over the whole vocabulary), and filtered (top_k or top_p: the same over the ranked
head of the row). Rows whose logits are edited first (engine/sampler/edits.py) are copied and chosen apart. On a GPU one
kernel serves the greedy rows and the plain ones without min_p; which way a row goes depends on its parameters alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import RequestError, RequestFailedError
from engine.plan import NewSlot
from engine.protocol import TokenLogprobs
from engine.sampler.edits import LogitEdits
from engine.sampler.filters import choose_filtered
from engine.sampler.logprobs import LogprobTensors, logprobs_of
from engine.sampler.masks import RowMasks, TokenMasks
from engine.sampler.noise import Purpose, noise_keys
from engine.sampler.order import first_argmax, take_rows
from engine.sampler.plain import PlainChoice
from engine.sampler.rows import RowParams

NOT_FINITE = "the model's logits for this request are not finite numbers"
_NOTHING_LEFT = (
    "bad_words, allowed_token_ids, the grammar and the other parameters of this request leave no token to choose"
)

Send = Callable[..., Sequence[Tensor]]
"""Numpy arrays to tensors on the device, in order."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of one step's rows. `token_ids` int64 [rows] is on the device; `host` waits for it.

    `logprob_rows` and `logprob_counts` name the rows that asked for logprobs and how many alternatives each wants.
    `limited_rows` are those whose requests take tokens away.
    """

    token_ids: Tensor
    failed: Tensor
    logprobs: LogprobTensors | None = None
    logprob_rows: tuple[int, ...] = ()
    logprob_counts: tuple[int, ...] = ()
    limited_rows: tuple[int, ...] = ()

    def kept(self) -> Tensor:
        """Return the tokens with -1 in place of a failed row's: int64 [rows] on the device."""
        return self.token_ids.masked_fill(self.failed, -1)

    def host(self) -> tuple[list[int], list[TokenLogprobs | None], list[str | None]]:
        """Return token ids, logprobs (None where not asked for) and errors. A row with an error has token id 0."""
        ids: list[int] = self.token_ids.tolist()
        errors = [self.error(row) if failed else None for row, failed in enumerate(self.failed.tolist())]
        logprobs = [values if error is None else None for values, error in zip(self.values(), errors, strict=True)]
        return ids, logprobs, errors

    def error(self, row: int) -> str:
        """Say why a row failed."""
        return _NOTHING_LEFT if row in self.limited_rows else NOT_FINITE

    def error_code(self, row: int) -> str:
        """Tell whether the request or the engine is at fault."""
        return RequestError.code if row in self.limited_rows else RequestFailedError.code

    def values(self) -> list[TokenLogprobs | None]:
        """Return the logprobs of each row, None where not asked for; they mean nothing for a failed row."""
        values: list[TokenLogprobs | None] = [None] * len(self.token_ids)
        if self.logprobs is not None:
            for row, own in zip(self.logprob_rows, self.logprobs.host(self.logprob_counts), strict=True):
                values[row] = own
        return values


class Sampler:
    """Parameters of `max_slots` slots, kept on the host: a step sends the device the few numbers that its rows use.

    `one_launch` (None: on a GPU) uses the kernel; `send` is how numbers get to the device.
    """

    def __init__(
        self,
        max_slots: int,
        vocab_size: int,
        device: torch.device,
        *,
        send: Send | None = None,
        one_launch: bool | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._send = send or self._send_each
        self._one_launch = device.type == "cuda" if one_launch is None else one_launch
        # What the kernel needs of a slot; a temperature of 0 is greedy.
        self._kernel_temperature = np.zeros(max_slots, dtype=np.float32)
        self._seed_words = np.zeros((2, max_slots), dtype=np.int32)
        self._needs_more = np.zeros(max_slots, dtype=np.bool_)
        self._greedy = np.ones(max_slots, dtype=np.bool_)
        self._temperature = np.ones(max_slots, dtype=np.float32)
        self._top_p = np.ones(max_slots, dtype=np.float64)
        self._top_k = np.zeros(max_slots, dtype=np.int64)
        self._log_min_p = np.full(max_slots, -np.inf, dtype=np.float32)
        self._seed = [0] * max_slots
        self._free_position = np.zeros(max_slots, dtype=np.int64)
        self._end_ids: list[tuple[int, ...]] = [()] * max_slots
        self._logprobs = np.full(max_slots, -1, dtype=np.int64)
        self._plain: PlainChoice | None = None
        self._edits = LogitEdits(max_slots, vocab_size, device)
        self._masks = TokenMasks(vocab_size, device)

    @torch.inference_mode()
    def set_slot(self, new_slot: NewSlot) -> None:
        """Take the parameters of the request that now has the slot."""
        slot, sampling = new_slot.slot, new_slot.sampling
        greedy = sampling.temperature == 0 or sampling.top_k == 1
        assert greedy or sampling.seed is not None, "admission gives every request a seed"
        self._greedy[slot] = greedy
        self._temperature[slot] = 1.0 if greedy else sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = sampling.top_k if 0 < sampling.top_k < self._vocab_size else 0
        self._log_min_p[slot] = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        self._seed[slot] = sampling.seed or 0
        self._free_position[slot] = new_slot.prompt_len + sampling.min_tokens
        self._end_ids[slot] = tuple(token for token in new_slot.end_ids if 0 <= token < self._vocab_size)
        self._logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        edited = self._edits.set_slot(new_slot)
        beyond_kernel = not greedy and (self._top_k[slot] > 0 or sampling.top_p < 1.0 or sampling.min_p > 0)
        self._kernel_temperature[slot] = 0.0 if greedy or beyond_kernel else sampling.temperature
        self._seed_words[:, slot] = np.array([self._seed[slot] % 2**64], dtype=np.uint64).view(np.int32)
        self._needs_more[slot] = beyond_kernel or edited or self._logprobs[slot] >= 0

    def kernel_rows(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
        """Return what the kernel needs of these slots: the seeds' low and high words, and temperatures."""
        low, high = self._seed_words[:, slots]
        return low, high, self._kernel_temperature[slots]

    def seeds(self, slots: NDArray[np.int64]) -> list[int]:
        return [self._seed[slot] for slot in slots.tolist()]

    def kernel_suffices(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> bool:
        """Tell whether the kernel alone serves the new tokens at `positions` of these slots."""
        if self._needs_more[slots].any():
            return False
        early = np.flatnonzero(positions < self._free_position[slots])
        return not any(self._end_ids[slot] for slot in slots[early].tolist())

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, slots: Sequence[int], positions: Sequence[int], masks: RowMasks | None = None
    ) -> Sampled:
        """Choose the token at `positions[i]` (the new token's absolute position) of `slots[i]` from row i of the
        logits [rows, at least vocab], where it has a mask among those that this allows. Ids are in [0, vocab) always.
        The logits are the same before and after.
        """
        logits = logits[:, : self._vocab_size]
        slot_of = np.asarray(slots, dtype=np.int64)
        wanted = self._edits.wanted(slot_of)
        if masks is not None and len(masks.rows):
            wanted = wanted.copy()
            wanted[list(masks.rows)] = True
        edited = np.flatnonzero(wanted)
        if not len(edited):
            token_ids, failed = self._choose(logits, slot_of, positions)
        else:
            at = np.asarray(positions, dtype=np.int64)
            token_ids, failed = self._choose_edited(logits, slot_of, at, edited, masks)
        sampled = self._with_logprobs(logits, slot_of, token_ids, failed)
        limited = self._edits.limited(slot_of)
        if masks is not None and len(masks.rows):
            limited = limited.copy()
            limited[list(masks.rows)] = True
        return replace(sampled, limited_rows=tuple(np.flatnonzero(limited).tolist())) if limited.any() else sampled

    def _choose_edited(
        self,
        logits: Tensor,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        edited: NDArray[np.int64],
        masks: RowMasks | None,
    ) -> tuple[Tensor, Tensor]:
        """As `_choose`, for a batch in which the rows `edited` have their logits edited, in a copy of their own."""
        token_ids = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        failed = torch.empty(len(slots), dtype=torch.bool, device=self._device)
        others = np.setdiff1d(np.arange(len(slots)), edited)
        to_send: list[NDArray[Any]] = [others, edited]
        if masks is not None:
            to_send += [np.searchsorted(edited, masks.rows), masks.words]
        others_at, edited_at, *masks_there = self._send(*to_send)
        if len(others):
            own = logits[others_at]
            token_ids[others_at], failed[others_at] = self._choose(own, slots[others], positions[others].tolist())
        own = logits[edited_at].to(torch.float32)
        if masks_there:
            self._masks.apply(own, *masks_there)
        self._edits.apply(own, slots[edited], positions[edited])
        token_ids[edited_at], failed[edited_at] = self._choose(own, slots[edited], positions[edited].tolist())
        self._edits.note(slots[edited], positions[edited], token_ids[edited_at])
        return token_ids, failed

    def _choose(self, logits: Tensor, slot_of: np.ndarray, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a token for each row, and whether its logits are no numbers to choose by."""
        with self._forbid_early_ends(logits, slot_of, positions):
            noisy = ~self._greedy[slot_of]
            ranked = noisy & ((self._top_k[slot_of] > 0) | (self._top_p[slot_of] < 1.0))
            plain = noisy & ~ranked
            if self._one_launch:
                token_ids, largest = self._choose_in_one_launch(logits, slot_of, positions)
                plain &= self._log_min_p[slot_of] > -np.inf
            else:
                largest, token_ids = first_argmax(logits)
            failed = ~largest.isfinite()
            for rows, choose in ((plain, self._choose_plain), (ranked, choose_filtered)):
                index = np.flatnonzero(rows)
                if len(index):
                    at = torch.from_numpy(index).to(self._device)
                    params = self._params(slot_of[index], [positions[row] for row in index.tolist()], largest[at])
                    token_ids[at] = choose(take_rows(logits, at), params)
        token_ids.masked_fill_(failed, 0)
        return token_ids, failed

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, target_ids: Sequence[int], top_k: int) -> list[TokenLogprobs]:
        """Return the log-probability of `target_ids[i]` under row i of the logits, with `top_k` alternatives."""
        targets = torch.tensor(target_ids, dtype=torch.int64, device=self._device)
        return logprobs_of(logits[:, : self._vocab_size], targets, top_k).host([top_k] * len(target_ids))

    def _choose_in_one_launch(
        self, logits: Tensor, slots: NDArray[np.int64], positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens of greedy and plain rows, the argmax of all others, and each row's largest logit."""
        from engine.kernels.sampling import choose_tokens

        keys = noise_keys(self.seeds(slots), positions, Purpose.TARGET).numpy()
        temperatures, keys_there = self._send(self._kernel_temperature[slots], keys)
        return choose_tokens(logits, temperatures, keys_there, self._vocab_size)

    def _send_each(self, *arrays: NDArray[Any]) -> list[Tensor]:
        return [torch.from_numpy(array).to(self._device) for array in arrays]

    def _choose_plain(self, logits: Tensor, params: RowParams) -> Tensor:
        if self._plain is None:
            self._plain = PlainChoice(self._vocab_size, self._device)
        return self._plain.choose(logits, params)

    def _params(self, slots: np.ndarray, positions: Sequence[int], largest: Tensor) -> RowParams:
        seeds = [self._seed[slot] for slot in slots]
        return RowParams(
            temperature=torch.from_numpy(self._temperature[slots]).to(self._device),
            top_p=torch.from_numpy(self._top_p[slots]).to(self._device),
            top_k=torch.from_numpy(self._top_k[slots]).to(self._device),
            log_min_p=torch.from_numpy(self._log_min_p[slots]).to(self._device),
            keys=noise_keys(seeds, positions, Purpose.TARGET).to(self._device),
            largest=largest.to(torch.float32),
            uses_min_p=bool((self._log_min_p[slots] > -np.inf).any()),
        )

    @contextmanager
    def _forbid_early_ends(self, logits: Tensor, slots: np.ndarray, positions: Sequence[int]) -> Iterator[None]:
        """Set end tokens of rows that have not reached min_tokens to -inf, and put the logits back afterwards:
        a copy of the whole batch would cost more than the choice, and logprobs want the unmodified values.
        """
        rows: list[int] = []
        ids: list[int] = []
        for row in np.flatnonzero(np.asarray(positions, dtype=np.int64) < self._free_position[slots]).tolist():
            end_ids = self._end_ids[slots[row]]
            rows += [row] * len(end_ids)
            ids += end_ids
        if not rows:
            yield
            return
        at = (torch.tensor(rows, device=self._device), torch.tensor(ids, device=self._device))
        before = logits[at]
        logits[at] = -torch.inf
        try:
            yield
        finally:
            logits[at] = before

    def _with_logprobs(self, logits: Tensor, slots: np.ndarray, token_ids: Tensor, failed: Tensor) -> Sampled:
        counts = self._logprobs[slots]
        rows = np.flatnonzero(counts >= 0)
        if not len(rows):
            return Sampled(token_ids, failed)
        at = torch.from_numpy(rows).to(self._device)
        wanted = counts[rows].tolist()
        logprobs = logprobs_of(take_rows(logits, at), token_ids[at], max(wanted))
        return Sampled(token_ids, failed, logprobs, tuple(rows.tolist()), tuple(wanted))
