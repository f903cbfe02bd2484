"""top_k, top_p and min_p of ranked rows, and the draw among what they keep. It knows no slots and no requests.

In that order: top_k keeps the first k in the order of engine/sampler/order.py; top_p keeps the shortest prefix of those
whose share of their mass is at least p; min_p keeps what is at least p times as probable as the first. The kept set is
exact, and a row's own values alone decide it.

Mass is counted in integers, 2^-40 of the most probable token: integer sums do not depend on the order of summation, so
neither threads, nor neighbours, nor how much of a row was ranked can move a token over the border. What that leaves out
is below vocabulary * 2^-41 of the mass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampler.noise import gumbel, noise_words
from engine.sampler.order import Ranked, is_exact, rank, rank_widths, take_rows
from engine.sampler.rows import RowParams

_MASS_SCALE = 2.0**40
_CHUNK_ELEMENTS = 2**19


def choose_filtered(logits: Tensor, params: RowParams) -> Tensor:
    """Return one token id of each row of [rows, vocab]: int64 [rows]."""
    rows, vocab = logits.shape
    token_ids = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    done = torch.zeros(rows, dtype=torch.bool, device=logits.device)
    mass = _masses(logits, params)
    for width in rank_widths(vocab):
        tried = torch.nonzero(~done & ((params.top_k < width) | (width == vocab))).squeeze(1)
        for chunk in torch.split(tried, max(1, _CHUNK_ELEMENTS // width)) if len(tried) else ():
            found = rank(take_rows(logits, chunk), width)
            chosen, exact = _draw(found, params.take(chunk), mass[chunk], vocab)
            token_ids[chunk[exact]] = chosen[exact]
            done[chunk[exact]] = True
        if done.all():
            break
    return token_ids


def _draw(found: Ranked, params: RowParams, mass: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Return a token of each ranked row, and whether enough of the row was ranked for it."""
    relative = params.relative(found.logits)
    index = torch.arange(relative.shape[1], device=relative.device)
    in_top_k = (index < params.top_k[:, None]) | (params.top_k == 0)[:, None]
    weights = _weights(relative).mul_(in_top_k)
    mass = torch.where(params.top_k > 0, weights.sum(dim=1), mass)
    before = weights.cumsum(dim=1).sub_(weights)
    in_top_p = (before < (mass * params.top_p)[:, None]) | (params.top_p >= 1.0)[:, None]
    kept = in_top_k & in_top_p
    exact = is_exact(found, kept.sum(dim=1), vocab)

    scores = found.logits.to(torch.float32).div(params.temperature[:, None])
    scores.add_(gumbel(noise_words(params.keys, found.ids)))
    scores.masked_fill_(~(kept & (relative >= params.log_min_p[:, None])), -torch.inf)
    best = scores == scores.amax(dim=1, keepdim=True)
    return torch.where(best, found.ids, vocab).amin(dim=1), exact


def _masses(logits: Tensor, params: RowParams) -> Tensor:
    """Return the whole mass of each row that has top_p without top_k, int64 [rows]; 0 for the others."""
    masses = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    rows = torch.nonzero((params.top_k == 0) & (params.top_p < 1.0)).squeeze(1)
    for chunk in torch.split(rows, max(1, _CHUNK_ELEMENTS // logits.shape[1])):
        masses[chunk] = _weights(params.take(chunk).relative(logits[chunk])).sum(dim=1)
    return masses


def _weights(relative: Tensor) -> Tensor:
    return relative.exp().mul_(_MASS_SCALE).to(torch.int64)
