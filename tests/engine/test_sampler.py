"""The sampler against slow obvious twins: what may be chosen, how often, and that neighbours never matter."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.plan import NewSlot
from engine.protocol import SamplingParams
from engine.sampler.noise import Purpose, gumbel, noise_keys, noise_words
from engine.sampler.order import first_argmax, largest, ranks_at_once, ranks_of
from engine.sampler.sampler import Sampler

CPU = torch.device("cpu")
PROMPT_LEN = 10


def sampler_of(
    params: Sequence[SamplingParams], vocab: int, end_ids: tuple[int, ...] = (), max_slots: int | None = None
) -> Sampler:
    sampler = Sampler(max_slots or len(params), vocab, CPU)
    for slot, sampling in enumerate(params):
        sampler.set_slot(NewSlot(slot, PROMPT_LEN, sampling, end_ids))
    return sampler


def kept_twin(logits: np.ndarray, params: SamplingParams) -> tuple[set[int], set[int]]:
    """Which ids the filters keep, in plain float64, and which of them rounding decides at the border of top_p."""
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    if params.top_k:
        order = order[: params.top_k]
    relative = {token: (float(logits[token]) - float(logits[order[0]])) / params.temperature for token in order}
    total = sum(math.exp(value) for value in relative.values())
    kept, unsure, before = set(), set(), 0.0
    for token in order:
        if params.top_p < 1 and abs(before / total - params.top_p) < 1e-6:
            unsure.add(token)
        if params.top_p >= 1 or before / total < params.top_p:
            kept.add(token)
        before += math.exp(relative[token])
    if params.min_p:
        floor = np.float32(math.log(params.min_p))
        likely = {token for token in order if np.float32(relative[token]) >= floor}
        kept, unsure = kept & likely, unsure & likely
    return kept | unsure, unsure


def token_twin(logits: np.ndarray, params: SamplingParams, position: int) -> set[int]:
    """The tokens that may come out: the best of what is kept under the noise, one set member per rounding outcome."""
    if params.temperature == 0:
        return {int(np.argmax(logits))}
    assert params.seed is not None
    keys = noise_keys([params.seed], [position], Purpose.TARGET)
    noise = gumbel(noise_words(keys, torch.arange(len(logits))))[0].double().numpy()
    scores = logits.astype(np.float64) / params.temperature + noise
    kept, unsure = kept_twin(logits, params)
    allowed = set()
    for pool in (kept, kept - unsure):
        best = max((scores[token] for token in pool), default=-math.inf)
        allowed |= {token for token in pool if scores[token] >= best - 1e-4}
    return allowed


def mixed_params(generator: random.Random, rows: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=generator.choice([0.0, 0.3, 1.0, 1.7]),
            top_p=generator.choice([1.0, 1.0, 0.9, 0.5, 0.99999]),
            top_k=generator.choice([0, 0, 1, 5, 50, 400]),
            min_p=generator.choice([0.0, 0.0, 0.1, 0.001]),
            seed=generator.choice([0, -1, generator.getrandbits(63), -generator.getrandbits(63)]),
            min_tokens=generator.choice([0, 5]),
            logprobs=generator.choice([None, None, 0, 3]),
        )
        for _ in range(rows)
    ]


@pytest.mark.parametrize("kind", ["plain", "ranked", "small_temperature_scale"])
def test_frequencies_follow_the_distribution(kind: str) -> None:
    probabilities = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005], dtype=torch.float64)
    temperature = 0.5 if kind == "small_temperature_scale" else 1.0
    logits = (probabilities.log() * temperature).float()
    draws, batch = 100_000, 1000
    params = SamplingParams(temperature=temperature, top_p=0.999999 if kind == "ranked" else 1.0, seed=11)
    sampler = sampler_of([params], 8)
    counts = torch.zeros(8, dtype=torch.int64)
    rows = logits.expand(batch, 8).clone()
    for start in range(0, draws, batch):
        sampled = sampler.sample(rows, [0] * batch, range(start, start + batch))
        counts += torch.bincount(sampled.token_ids, minlength=8)
    chi_square = ((counts - probabilities * draws) ** 2 / (probabilities * draws)).sum().item()
    assert chi_square < 24.3, counts  # 7 degrees of freedom: exceeded once in a thousand seeds, and this one is fixed


def test_frequencies_over_seeds_at_one_position_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    seeds = 4000
    sampler = sampler_of([SamplingParams(seed=seed) for seed in range(seeds)], 4)
    sampled = sampler.sample(probabilities.log().float().expand(seeds, 4).clone(), range(seeds), [20] * seeds)
    counts = torch.bincount(sampled.token_ids, minlength=4)
    assert ((counts - probabilities * seeds) ** 2 / (probabilities * seeds)).sum().item() < 16.3


def test_consecutive_positions_are_independent() -> None:
    sampler = sampler_of([SamplingParams(seed=5)], 4)
    tokens = sampler.sample(torch.zeros(16_001, 4), [0] * 16_001, range(16_001)).token_ids
    pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16).double()
    assert ((pairs - 1000) ** 2 / 1000).sum().item() < 37.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [512, 1300, 4099])
def test_a_row_does_not_depend_on_its_neighbours(vocab: int, dtype: torch.dtype) -> None:
    generator = random.Random(vocab)
    rows = 40
    params = mixed_params(generator, rows)
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).to(dtype)
    positions = [generator.randrange(PROMPT_LEN, PROMPT_LEN + 20) for _ in range(rows)]
    sampler = sampler_of(params, vocab, end_ids=(1, 2))
    ids, logprobs, errors = sampler.sample(logits, range(rows), positions).host()
    assert errors == [None] * rows
    assert len(set(ids)) > rows // 2
    for size in (1, 2, 7, rows):
        chosen = generator.sample(range(rows), size)
        part = sampler.sample(logits[chosen], chosen, [positions[row] for row in chosen]).host()
        assert part[0] == [ids[row] for row in chosen]
        assert part[1] == [logprobs[row] for row in chosen]
    for row in range(rows):
        assert sampler.sample(logits[row : row + 1], [row], [positions[row]]).token_ids.tolist() == [ids[row]]


def test_the_slot_number_and_the_slots_before_do_not_matter() -> None:
    params = SamplingParams(seed=3, top_p=0.9)
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(0))
    low = sampler_of([params], 700)
    high = Sampler(4, 700, CPU)
    high.set_slot(NewSlot(3, 1, SamplingParams(temperature=0.0, min_tokens=99, logprobs=2), (5,)))
    high.set_slot(NewSlot(3, PROMPT_LEN, params))
    for position in range(10, 40):
        expected = low.sample(logits, [0], [position]).host()
        assert high.sample(logits, [3], [position]).host() == expected


@given(
    logits=st.lists(st.sampled_from([-4.0, -1.0, 0.0, 0.5, 0.53125, 1.0, 2.0, 3.5, 9.0]), min_size=2, max_size=300),
    temperature=st.sampled_from([0.0, 0.25, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 3, 17, 129, 1000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(PROMPT_LEN, 10_000),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_filters_equal_their_twin(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    row = np.array(logits, dtype=np.float32)
    token = sampler_of([params], len(row)).sample(torch.from_numpy(row)[None], [0], [position]).token_ids.item()
    assert token in token_twin(row, params, position)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.3, seed=1),
        SamplingParams(top_p=0.95, temperature=3.0, seed=2),
        SamplingParams(top_p=0.9999, temperature=8.0, seed=3),
        SamplingParams(top_k=1500, seed=4),
        SamplingParams(top_k=1500, top_p=0.8, temperature=9.0, seed=5),
        SamplingParams(top_k=127, min_p=0.02, seed=6),
    ],
)
def test_filters_equal_their_twin_however_much_of_the_row_they_need(params: SamplingParams) -> None:
    """Logits in steps of 1/16, so that every border falls among equals, of a vocabulary beyond all partial widths."""
    generator = torch.Generator().manual_seed(9)
    logits = (torch.randn(6, 12_000, generator=generator) * 48).round() / 16
    sampler = sampler_of([params] * 6, 12_000)
    tokens = sampler.sample(logits, range(6), range(100, 106)).token_ids.tolist()
    for row in range(6):
        assert tokens[row] in token_twin(logits[row].numpy(), params, 100 + row)


def test_ties_at_a_filters_border_go_to_the_lower_ids() -> None:
    logits = torch.zeros(1, 2000)
    logits[0, 1990] = 0.5
    for params in (SamplingParams(top_k=3, seed=0), SamplingParams(top_p=1.0 / 1900, seed=0)):
        sampler = sampler_of([params], 2000)
        seen = set(sampler.sample(logits.expand(300, 2000).clone(), [0] * 300, range(300)).token_ids.tolist())
        assert seen == ({1990, 0, 1} if params.top_k else {1990})


def test_a_filter_keeps_what_it_may_with_every_token_reachable() -> None:
    logits = torch.tensor([[2.0, 1.9, 1.8, 1.7, 1.6]])
    for params, expected in (
        (SamplingParams(top_k=3, seed=0), {0, 1, 2}),
        (SamplingParams(top_p=0.45, seed=0), {0, 1}),
        (SamplingParams(min_p=0.8, seed=0), {0, 1, 2}),
        (SamplingParams(min_p=1.0, top_p=0.9, seed=0), {0}),
        (SamplingParams(seed=0), {0, 1, 2, 3, 4}),
    ):
        tokens = sampler_of([params], 5).sample(logits.expand(500, 5).clone(), [0] * 500, range(500)).token_ids
        assert set(tokens.tolist()) == expected, params


def test_top_k_one_equals_greedy_with_ties_and_any_temperature() -> None:
    logits = (torch.randn(50, 1000, generator=torch.Generator().manual_seed(2)) * 4).round() / 2
    greedy = sampler_of([SamplingParams(temperature=0.0)] * 50, 1000).sample(logits, range(50), [20] * 50)
    top_one = [SamplingParams(temperature=5.0, top_k=1, top_p=0.5, seed=seed) for seed in range(50)]
    assert torch.equal(sampler_of(top_one, 1000).sample(logits, range(50), [20] * 50).token_ids, greedy.token_ids)


@pytest.mark.parametrize("vocab", [5, 255, 256, 512, 49152, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_id_of_equals(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(16, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype).round()
    values, ids = first_argmax(logits)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert ids.tolist() == expected
    assert values.tolist() == [max(row) for row in logits.tolist()]
    params = [SamplingParams(temperature=0.0)] * 16
    assert sampler_of(params, vocab).sample(logits, range(16), [20] * 16).token_ids.tolist() == expected


def test_a_tiny_temperature_comes_to_greedy() -> None:
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(4))
    sampler = sampler_of([SamplingParams(temperature=1e-6, seed=seed) for seed in range(8)], 300)
    assert torch.equal(sampler.sample(logits, range(8), [11] * 8).token_ids, logits.argmax(1))


def test_a_huge_temperature_is_uniform_and_in_range() -> None:
    sampler = sampler_of([SamplingParams(temperature=1e30, seed=1)], 16)
    tokens = sampler.sample(torch.randn(3200, 16), [0] * 3200, range(3200)).token_ids
    counts = torch.bincount(tokens, minlength=16).double()
    assert ((counts - 200) ** 2 / 200).sum().item() < 37.7


def test_seeds_decide_the_token_of_each_row() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 42, 42, 42 + 2**32]
    sampler = sampler_of([SamplingParams(seed=seed) for seed in seeds], 4096)
    logits = torch.zeros(len(seeds), 4096)
    tokens = sampler.sample(logits, range(len(seeds)), [33] * len(seeds)).token_ids.tolist()
    assert tokens[5] == tokens[6]
    assert len(set(tokens)) == len(seeds) - 1
    assert tokens == sampler.sample(logits, range(len(seeds)), [33] * len(seeds)).token_ids.tolist()
    assert tokens != sampler.sample(logits, range(len(seeds)), [34] * len(seeds)).token_ids.tolist()


def test_min_tokens_forbids_end_ids_by_output_index() -> None:
    logits = torch.zeros(1, 300)
    logits[0, 7], logits[0, 9], logits[0, 4] = 50.0, 49.0, 40.0
    for params in (
        SamplingParams(temperature=0.0, min_tokens=3),
        SamplingParams(seed=0, min_tokens=3),
        SamplingParams(seed=0, top_k=2, min_tokens=3),
        SamplingParams(seed=0, top_p=0.9, min_tokens=3),
    ):
        sampler = sampler_of([params], 300, end_ids=(7, 9, 300, -1))
        tokens = [sampler.sample(logits, [0], [PROMPT_LEN + index]).token_ids.item() for index in range(5)]
        assert tokens == [4, 4, 4, tokens[3], tokens[4]]
        assert {tokens[3], tokens[4]} <= {7, 9}


def test_min_tokens_leaves_the_logits_and_the_logprobs_as_they_were() -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    params = [SamplingParams(temperature=0.0, min_tokens=3, logprobs=4)] * 3
    sampled = sampler_of(params, 300, end_ids=tuple(range(299))).sample(logits, range(3), [PROMPT_LEN] * 3)
    assert torch.equal(logits, before)
    ids, logprobs, errors = sampled.host()
    assert ids == [299] * 3
    assert errors == [None] * 3
    reference = torch.log_softmax(before, dim=1)
    for row, entry in enumerate(logprobs):
        assert entry is not None
        assert entry.logprob == reference[row, 299].item()
        assert entry.top_ids == reference[row].topk(4).indices.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_equal_log_softmax_with_each_rows_own_count(dtype: torch.dtype) -> None:
    logits = (torch.randn(4, 5000, generator=torch.Generator().manual_seed(5)) * 4).to(dtype)
    counts = [0, None, 5, 20]
    sampler = sampler_of([SamplingParams(seed=row, logprobs=count) for row, count in enumerate(counts)], 5000)
    ids, logprobs, _ = sampler.sample(logits, range(4), [20] * 4).host()
    reference = torch.log_softmax(logits.double(), dim=1)
    for row, count in enumerate(counts):
        entry = logprobs[row]
        if count is None:
            assert entry is None
            continue
        assert entry is not None
        assert entry.logprob == pytest.approx(reference[row, ids[row]].item(), abs=1e-4)
        order = sorted(range(5000), key=lambda token: (-logits[row, token].item(), token))
        assert entry.rank == 1 + order.index(ids[row])
        order = order[:count]
        assert entry.top_ids == order
        assert entry.top_logprobs == pytest.approx(reference[row, order].tolist(), abs=1e-4)


@pytest.mark.parametrize("ranks", [ranks_of, ranks_at_once])
def test_a_rank_is_the_place_among_all_tokens_with_equals_by_id(ranks: Callable[[Tensor, Tensor], Tensor]) -> None:
    rows = torch.tensor([[3.0, 5, 5, -torch.inf, 5, 3, -torch.inf]] * 7)
    assert ranks(rows, torch.arange(7)).tolist() == [4, 1, 2, 6, 3, 5, 7]
    assert ranks(rows[:0], torch.arange(0)).tolist() == []


def test_logprobs_are_finite_on_the_wire() -> None:
    logits = torch.full((1, 300), -torch.inf)
    logits[0, 3] = 1.0
    _, logprobs, errors = sampler_of([SamplingParams(seed=0, logprobs=3)], 300).sample(logits, [0], [20]).host()
    assert errors == [None]
    assert logprobs[0] is not None
    assert (logprobs[0].logprob, logprobs[0].top_ids) == (0.0, [3, 0, 1])
    assert logprobs[0].top_logprobs == [0.0, -9999.0, -9999.0]


@pytest.mark.parametrize("rows", [0, 1, 5, 300])
def test_prompt_logprobs_equal_log_softmax_in_any_chunk(rows: int) -> None:
    vocab = 30_000
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(rows, vocab, generator=generator)
    targets = torch.randint(0, vocab, (rows,), generator=generator).tolist()
    sampler = Sampler(1, vocab, CPU)
    whole = sampler.prompt_logprobs(logits, targets, 2)
    assert len(whole) == rows
    reference = torch.log_softmax(logits, dim=1)
    for row in range(rows):
        assert whole[row].logprob == reference[row, targets[row]].item()
        assert whole[row].top_logprobs == sorted(whole[row].top_logprobs, reverse=True)
        assert whole[row].top_ids[0] == logits[row].argmax().item()
        own, target = logits[row], targets[row]
        assert whole[row].rank == 1 + int((own > own[target]).sum() + (own[:target] == own[target]).sum())
    cut = rows // 3
    parts = sampler.prompt_logprobs(logits[:cut], targets[:cut], 2)
    assert parts + sampler.prompt_logprobs(logits[cut:], targets[cut:], 2) == whole


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "one nan"])
def test_a_row_without_finite_logits_fails_alone(bad: float | str) -> None:
    kinds = [
        SamplingParams(temperature=0.0, logprobs=1),
        SamplingParams(seed=0, logprobs=1),
        SamplingParams(seed=0, top_p=0.9),
        SamplingParams(seed=0, top_k=5, logprobs=0),
        SamplingParams(seed=0, min_p=0.1),
    ]
    params = [kind for kind in kinds for _ in range(2)]
    logits = torch.randn(len(params), 2000, generator=torch.Generator().manual_seed(8))
    sampler = sampler_of(params, 2000)
    good = sampler.sample(logits, range(len(params)), [20] * len(params)).host()
    if isinstance(bad, str):
        logits[::2, 1234] = math.nan
    else:
        logits[::2] = bad
    ids, logprobs, errors = sampler.sample(logits, range(len(params)), [20] * len(params)).host()
    assert all("not finite" in (errors[row] or "") for row in range(0, len(params), 2))
    assert ids[::2] == [0] * len(kinds)
    assert logprobs[::2] == [None] * len(kinds)
    assert (ids[1::2], logprobs[1::2], errors[1::2]) == (good[0][1::2], good[1][1::2], [None] * len(kinds))


def test_ids_stay_inside_the_vocabulary_when_the_model_pads_it() -> None:
    params = [SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(seed=1, top_p=0.9, logprobs=3)]
    logits = torch.zeros(3, 320)
    logits[:, 300:] = 99.0
    ids, logprobs, _ = sampler_of(params, 300).sample(logits, range(3), [20] * 3).host()
    assert all(0 <= token < 300 for token in ids)
    assert logprobs[2] is not None
    assert max(logprobs[2].top_ids) < 300


def test_no_rows_is_no_work() -> None:
    assert sampler_of([], 300, max_slots=2).sample(torch.zeros(0, 300), [], []).host() == ([], [], [])


@given(
    values=st.lists(st.sampled_from([-math.inf, -1.5, -1.0, 0.0, -0.0, 1.0, 2.0]), min_size=1, max_size=6000),
    count=st.integers(1, 5000),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_largest_orders_by_value_and_then_by_id(values: list[float], count: int) -> None:
    found = largest(torch.tensor([values, values[::-1]]), count)
    for row, source in enumerate((values, values[::-1])):
        expected = sorted(range(len(source)), key=lambda token: (-source[token], token))[:count]
        assert found.ids[row].tolist() == expected
        assert found.logits[row].tolist() == [source[token] for token in expected]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_chooses_the_tokens_of_the_cpu(dtype: torch.dtype) -> None:
    """The noise is integer for integer the same, and these logits have no near ties that rounding could turn."""
    cuda, vocab, rows = torch.device("cuda"), 49_152, 60
    params = mixed_params(random.Random(1), rows)
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    keys = noise_keys(range(rows), range(rows), Purpose.TARGET)
    ids = torch.arange(vocab)
    assert torch.equal(noise_words(keys.to(cuda), ids.to(cuda)).cpu(), noise_words(keys, ids))
    on_cuda = Sampler(rows, vocab, cuda)
    for slot, sampling in enumerate(params):
        on_cuda.set_slot(NewSlot(slot, PROMPT_LEN, sampling, (1, 2)))
    on_cpu = sampler_of(params, vocab, end_ids=(1, 2))
    for position in range(PROMPT_LEN, PROMPT_LEN + 10):
        expected = on_cpu.sample(logits, range(rows), [position] * rows).host()
        found = on_cuda.sample(logits.to(cuda), range(rows), [position] * rows).host()
        assert found[0] == expected[0]
        assert found[2] == expected[2]
        for mine, other in zip(found[1], expected[1], strict=True):
            assert (mine is None) == (other is None)
            if mine is not None and other is not None:
                assert mine.top_ids == other.top_ids
                assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
