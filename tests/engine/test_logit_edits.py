"""Penalties, biases and bans against a plain numpy twin, and that neighbours, batches and resumption never matter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan import NewSlot
from engine.protocol import SamplingParams
from engine.sampler.edits import LogitEdits
from engine.sampler.sampler import Sampler
from engine.validation import MAX_BAD_WORD_TOKENS

CPU = torch.device("cpu")
VOCAB = 24


def edited_twin(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]
) -> np.ndarray:
    """What engine/sampler/edits.py says, token by token in float32."""
    edited = logits.astype(np.float32).copy()
    for token in range(len(edited)):
        value = edited[token]
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            value = np.float32(-np.inf)
        for word in params.bad_words:
            before = list(word[:-1])
            if token == word[-1] and list(outputs)[len(outputs) - len(before) :] == before:
                value = np.float32(-np.inf)
        value = value + np.float32(params.logit_bias.get(token, 0.0))
        if token in prompt or token in outputs:
            factor = np.float32(params.repetition_penalty)
            if params.repetition_penalty != 1:
                value = value / factor if value > 0 else value * factor
        count = list(outputs).count(token)
        value = value - np.float32(count) * np.float32(params.frequency_penalty)
        value = value - np.float32(count > 0) * np.float32(params.presence_penalty)
        edited[token] = value
    return edited


tokens = st.integers(0, VOCAB - 1)
params_of_edits = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0, 1.7]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -1.0, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7, 3.0]),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=4),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=4).map(tuple), max_size=5).map(tuple),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=1, max_size=9).map(tuple),
)


@settings(deadline=None, max_examples=150)
@given(
    rows=st.lists(
        st.tuples(params_of_edits, st.lists(tokens, min_size=1, max_size=6), st.lists(tokens, max_size=8)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 1000),
)
def test_edits_are_the_twins_bit_for_bit(rows: list[tuple[SamplingParams, list[int], list[int]]], seed: int) -> None:
    edits = LogitEdits(8, VOCAB, CPU)
    for slot, (params, prompt, outputs) in enumerate(rows):
        edits.set_slot(NewSlot(slot, len(prompt), params, prompt_ids=tuple(prompt), output_ids=tuple(outputs)))
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 4, (len(rows), VOCAB)).astype(np.float32))
    edited = logits.clone()
    positions = np.array([len(prompt) + len(outputs) for _, prompt, outputs in rows])
    edits.apply(edited, np.arange(len(rows)), positions)
    for row, (params, prompt, outputs) in enumerate(rows):
        expected = edited_twin(logits[row].numpy(), params, prompt, outputs)
        # Adding zero turns -0.0 into 0.0 in the one and not in the other: equal numbers.
        np.testing.assert_array_equal(edited[row].numpy(), expected)


@settings(deadline=None, max_examples=60)
@given(
    params=params_of_edits,
    prompt=st.lists(tokens, min_size=1, max_size=5),
    outputs=st.lists(tokens, min_size=1, max_size=2 * MAX_BAD_WORD_TOKENS + 5),
    cut=st.integers(0, 200),
)
def test_tokens_noted_one_by_one_are_the_same_as_those_of_a_resumed_request(
    params: SamplingParams, prompt: list[int], outputs: list[int], cut: int
) -> None:
    cut = min(cut, len(outputs))
    edits = LogitEdits(2, VOCAB, CPU)
    grown = NewSlot(0, len(prompt), params, prompt_ids=tuple(prompt), output_ids=tuple(outputs[:cut]))
    edits.set_slot(grown)
    for index in range(cut, len(outputs)):
        position = np.array([len(prompt) + index])
        edits.note(np.array([0]), position, torch.tensor([outputs[index]]))
    edits.set_slot(NewSlot(1, len(prompt), params, prompt_ids=tuple(prompt), output_ids=tuple(outputs)))
    logits = torch.linspace(-3, 3, VOCAB).repeat(2, 1)
    edits.apply(logits, np.array([0, 1]), np.array([len(prompt) + len(outputs)] * 2))
    assert torch.equal(logits[0], logits[1])


def random_params(rng: random.Random) -> SamplingParams:
    """Over all parameters of the sampler, most of them off most of the time."""

    def maybe(value: object, off: object) -> object:
        return value if rng.random() < 0.35 else off

    sequences = tuple(tuple(rng.choices(range(VOCAB), k=rng.choice([1, 1, 2, 3]))) for _ in range(3))
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_p=maybe(0.8, 1.0),  # type: ignore[arg-type]
        top_k=maybe(5, 0),  # type: ignore[arg-type]
        min_p=maybe(0.05, 0.0),  # type: ignore[arg-type]
        seed=rng.getrandbits(63),
        min_tokens=maybe(6, 0),  # type: ignore[arg-type]
        logprobs=maybe(3, None),  # type: ignore[arg-type]
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),  # type: ignore[arg-type]
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),  # type: ignore[arg-type]
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),  # type: ignore[arg-type]
        logit_bias=maybe({rng.randrange(VOCAB): rng.uniform(-5, 5)}, {}),  # type: ignore[arg-type]
        bad_words=maybe(sequences, ()),  # type: ignore[arg-type]
        allowed_token_ids=maybe((*range(0, VOCAB, 2), 1, 3), None),  # type: ignore[arg-type]
    )


def logits_after(prefix: Sequence[int]) -> torch.Tensor:
    """A model's: they depend on the whole prefix."""
    seed = np.random.SeedSequence([*prefix, 1])
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, VOCAB)).to(torch.bfloat16)


def generated_alone(params: SamplingParams, prompt: list[int], count: int) -> list[int]:
    sampler = Sampler(1, VOCAB, CPU)
    sampler.set_slot(NewSlot(0, len(prompt), params, (0, 1), prompt_ids=tuple(prompt)))
    sequence = list(prompt)
    for _ in range(count):
        ids, _, errors = sampler.sample(logits_after(sequence)[None].clone(), [0], [len(sequence)]).host()
        if errors[0] is not None:
            break
        sequence.append(ids[0])
    return sequence[len(prompt) :]


@pytest.mark.parametrize("seed", range(4))
def test_a_row_of_any_parameters_is_the_same_alone_and_in_any_batch(seed: int) -> None:
    rng = random.Random(seed)
    count, slots = 12, 10
    requests = [(random_params(rng), rng.choices(range(VOCAB), k=rng.randint(1, 5))) for _ in range(14)]
    alone = [generated_alone(params, prompt, count) for params, prompt in requests]
    sampler = Sampler(slots, VOCAB, CPU)
    outputs: list[list[int]] = [[] for _ in requests]
    slot_of: dict[int, int] = {}
    while any(len(own) < len(expected) for own, expected in zip(outputs, alone, strict=True)):
        waiting = [i for i in range(len(requests)) if i not in slot_of and len(outputs[i]) < len(alone[i])]
        free = [slot for slot in range(slots) if slot not in slot_of.values()]
        for request, slot in zip(rng.sample(waiting, len(waiting)), free, strict=False):
            params, prompt = requests[request]
            resumed = tuple(outputs[request])
            sampler.set_slot(NewSlot(slot, len(prompt), params, (0, 1), None, tuple(prompt), resumed))
            slot_of[request] = slot
        rows = rng.sample(sorted(slot_of), rng.randint(1, len(slot_of)))
        prefixes = [requests[row][1] + outputs[row] for row in rows]
        logits = torch.stack([logits_after(prefix) for prefix in prefixes])
        before = logits.clone()
        sampled = sampler.sample(logits, [slot_of[row] for row in rows], [len(prefix) for prefix in prefixes])
        assert torch.equal(logits, before), "the logits are the same before and after"
        for row, token in zip(rows, sampled.host()[0], strict=True):
            outputs[row].append(token)
            if len(outputs[row]) >= len(alone[row]) or rng.random() < 0.2:  # over, or preempted
                del slot_of[row]
    assert outputs == alone
    assert sum(map(len, outputs)) > 10 * count, "most requests find tokens"


def chosen(
    params: SamplingParams, logits: torch.Tensor, outputs: Sequence[int] = (), prompt: Sequence[int] = ()
) -> int:
    sampler = Sampler(1, logits.shape[0], CPU)
    sampler.set_slot(NewSlot(0, 7, params, prompt_ids=tuple(prompt), output_ids=tuple(outputs)))
    return sampler.sample(logits[None].clone(), [0], [7 + len(outputs)]).host()[0][0]


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_bias_of_100_forces_and_one_of_minus_100_bans(temperature: float) -> None:
    logits = torch.linspace(-15, 15, 500)
    for seed in range(20):
        forced = SamplingParams(temperature=temperature, seed=seed, logit_bias={3: 100.0})
        assert chosen(forced, logits) == 3
        banned = SamplingParams(temperature=temperature, seed=seed, logit_bias=dict.fromkeys(range(480, 500), -100.0))
        assert chosen(banned, logits) < 480


def test_presence_and_frequency_count_the_output_alone_and_repetition_the_prompt_too() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0])
    penalised = SamplingParams(temperature=0, presence_penalty=2, frequency_penalty=2)
    assert chosen(penalised, logits, prompt=[2, 2, 2]) == 2
    assert chosen(penalised, logits, outputs=[2]) == 1
    repeated = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert chosen(repeated, logits, prompt=[2]) == 1
    assert chosen(repeated, logits, outputs=[2, 1]) == 2
    assert chosen(repeated, -logits, prompt=[0]) == 0
    assert chosen(repeated, -logits, prompt=[0], outputs=[0, 0, 0]) == 0
    assert chosen(SamplingParams(temperature=0, repetition_penalty=2.5), -logits, prompt=[0]) == 1


def test_a_row_with_nothing_left_fails_alone_and_says_why() -> None:
    sampler = Sampler(2, 4, CPU)
    words = tuple((token,) for token in range(4))
    penalised = SamplingParams(temperature=0, presence_penalty=1, bad_words=words)
    sampler.set_slot(NewSlot(0, 1, penalised))
    sampler.set_slot(NewSlot(1, 1, SamplingParams(temperature=0)))
    ids, _, errors = sampler.sample(torch.tensor([[1.0, 2, 3, 4]] * 2), [0, 1], [1, 1]).host()
    assert ids == [0, 3]
    assert errors[1] is None
    assert errors[0] is not None
    assert "leave no token" in errors[0]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, "request_failed"),
        ({"presence_penalty": 1, "repetition_penalty": 1.2, "logit_bias": {0: -100.0}}, "request_failed"),
        ({"allowed_token_ids": (1,), "bad_words": ((1,),)}, "invalid_value"),
    ],
)
def test_a_model_without_numbers_is_blamed_where_the_request_takes_no_token_away(
    fields: dict[str, Any], code: str
) -> None:
    sampler = Sampler(1, 4, CPU)
    sampler.set_slot(NewSlot(0, 1, SamplingParams(temperature=0, **fields)))
    logits = torch.ones(1, 4) if code == "invalid_value" else torch.full((1, 4), torch.nan)
    sampled = sampler.sample(logits, [0], [1])
    assert sampled.failed.tolist() == [True]
    assert sampled.error_code(0) == code


def test_logprobs_are_those_of_the_logits_before_any_edit() -> None:
    params = SamplingParams(temperature=0, logprobs=2, logit_bias={0: 100.0}, repetition_penalty=2.0)
    sampler = Sampler(1, 3, CPU)
    sampler.set_slot(NewSlot(0, 1, params, prompt_ids=(2,)))
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    _, logprobs, _ = sampler.sample(logits, [0], [1]).host()
    expected = torch.log_softmax(logits[0], 0)
    assert logprobs[0] is not None
    assert logprobs[0].logprob == pytest.approx(expected[0].item())
    assert logprobs[0].top_ids == [2, 1]
