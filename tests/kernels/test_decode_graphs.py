"""Decode steps by the GPU's way: the same kernels, buffers, buckets and padding; captured only where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.plan_driver import DrivenSequence, PlanDriver
from engine.attention.triton_backend import TritonAttention
from engine.kernels.decode import HEADER_COLUMNS, decode_inputs, keep_tokens
from engine.layers.row_ops import kernel_ops
from engine.loader.load import LoadedModel
from engine.models.llama import Llama
from engine.plan import Row
from engine.protocol import SamplingParams
from engine.runner import prompt_graphs
from engine.runner.decode_graphs import MAX_ROWS, row_buckets, table_widths
from engine.runner.runner import TorchRunner
from engine.sampler.noise import Purpose, noise_keys
from tests.support.decoders import write_decoder
from tests.support.loading import load
from tests.support.row_masks import row_masks
from tests.support.tiny_models import write_tiny_llama

SAMPLINGS = (
    SamplingParams(temperature=0.0, seed=0),
    SamplingParams(temperature=0.8, seed=2**63 + 5),
    SamplingParams(temperature=1.1, top_k=5, seed=7),
    SamplingParams(temperature=0.7, min_p=0.05, seed=8, logprobs=2, frequency_penalty=0.5),
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_tiny_llama(tmp_path_factory.mktemp("tiny")), operators="torch")


def device_runner(
    driver: PlanDriver, loaded: LoadedModel, device: torch.device, max_step_tokens: int = 64
) -> TorchRunner:
    """Put the GPU's way under a driver: its model, back end and runner."""
    module = loaded.module
    assert isinstance(module, Llama)
    ours = Llama(
        module.config,
        ops=kernel_ops("default"),
        backend=TritonAttention(),
        max_positions=loaded.max_model_len,
        dtype=loaded.dtype,
        device=device,
    )
    for (name, target), (same_name, source) in zip(ours.named_parts(), module.named_parts(), strict=True):
        assert name == same_name
        target.copy_(source)
    driver.cache.keeps_finite = False
    for pair in driver.cache.layers:
        for tensor in pair:
            tensor.fill_(torch.nan)
    runner = TorchRunner(
        ours,
        driver.cache,
        block_size=driver.block_size,
        max_slots=8,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        device=device,
        max_in_flight=2,
        max_step_tokens=max_step_tokens,
        graphs=True,
        one_launch=True,
    )
    runner.warm_up(lambda fraction, phase: None)
    return runner


def continuations(driver: PlanDriver, steps: int) -> list[list[int]]:
    """Prompts of several lengths in one step, the rest of the longest among decode rows, then decode steps, and the
    longest leaves the batch half way."""
    prompts = [list(range(10, 10 + length)) for length in (5, 30, 47, 17)]
    sequences: list[DrivenSequence] = [
        driver.open(prompt, sampling=sampling) for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)
    ]
    driver.step([(sequence, min(30, len(sequence.tokens))) for sequence in sequences])
    driver.step([(sequence, len(sequence.tokens) - sequence.computed) for sequence in sequences], on_device=True)
    for step in range(steps):
        live = sequences if step < steps // 2 else [sequences[at] for at in (3, 0, 1)]
        results = driver.step([(sequence, 1) for sequence in live], on_device=True)
        assert all(row.error is None for row in results)
    return [sequence.tokens for sequence in sequences]


def note_replays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Return the list of every attempt to run a step as a graph from here on, and whether there was one for it."""
    replayed: list[tuple[str, bool]] = []
    for name in ("_replay_decode", "_replay_prompts"):
        replay = getattr(TorchRunner, name)

        def noted(*args: object, replay: Callable[..., bool] = replay, name: str = name) -> bool:
            replayed.append((name, replay(*args)))
            return replayed[-1][1]

        monkeypatch.setattr(TorchRunner, name, noted)
    return replayed


@pytest.mark.parametrize("decoder", [pytest.param("llama3 rope", marks=pytest.mark.soak), "qwen3, biases, mixed"])
def test_tokens_are_those_of_the_cpus_operators(
    device: torch.device, decoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = load(write_decoder(tmp_path, decoder), operators="torch")
    expected = continuations(PlanDriver(reference, num_blocks=40, block_size=16, max_slots=8), 4)
    driver = PlanDriver(reference, num_blocks=40, block_size=16, max_slots=8)
    driver.runner = device_runner(driver, reference, device)
    replayed = note_replays(monkeypatch)
    assert continuations(driver, 4) == expected
    prompts = [("_replay_decode", False), ("_replay_prompts", True)]
    assert replayed == [*prompts, *prompts, *[("_replay_decode", True)] * 4]
    assert len({tuple(tokens[-3:]) for tokens in expected}) == 4


def test_a_full_step_has_a_graph_and_one_between_has_none(
    device: torch.device, reference: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_graphs, "TOKEN_BUCKETS", (16,))

    def run(driver: PlanDriver) -> list[int]:
        sequence = driver.open(list(range(10, 176)), sampling=SAMPLINGS[1])
        for count in (61, 40, 58, 7):  # full, between, as good as full, few
            driver.step([(sequence, count)])
        return sequence.tokens

    expected = run(PlanDriver(reference, num_blocks=40, block_size=16, max_slots=8))
    driver = PlanDriver(reference, num_blocks=40, block_size=16, max_slots=8)
    driver.runner = device_runner(driver, reference, device, max_step_tokens=61)
    replayed = note_replays(monkeypatch)
    assert run(driver) == expected
    assert [hit for name, hit in replayed if name == "_replay_prompts"] == [True, False, True, True]


def test_masked_rows_choose_what_the_cpus_operators_choose(device: torch.device, reference: LoadedModel) -> None:
    """In steps with prompts and in decode steps; the graph's own choice gives way, also as the next step's token."""
    allowed = {0: range(40, 60), 2: range(70, 75), 3: [80]}

    def run(driver: PlanDriver) -> list[list[int]]:
        prompts = [[11, 12, 13], [21, 22], [31, 32, 33, 34], [41]]
        sequences = [driver.open(p, sampling=sampling) for p, sampling in zip(prompts, SAMPLINGS, strict=True)]
        masks = row_masks(allowed, reference.vocab_size)
        driver.step([(one, len(one.tokens)) for one in sequences], masks=masks)
        for _ in range(3):
            driver.step([(one, 1) for one in sequences], on_device=True, masks=masks)
        for row, ids in allowed.items():
            assert set(sequences[row].tokens[len(prompts[row]) :]) <= set(ids)
        return [one.tokens for one in sequences]

    expected = run(PlanDriver(reference, num_blocks=40, block_size=16, max_slots=8))
    driver = PlanDriver(reference, num_blocks=40, block_size=16, max_slots=8)
    driver.runner = device_runner(driver, reference, device)
    assert run(driver) == expected


def test_logits_that_are_not_finite_end_their_row_alone(device: torch.device, reference: LoadedModel) -> None:
    driver = PlanDriver(reference, num_blocks=40, block_size=16, max_slots=8)
    driver.runner = device_runner(driver, reference, device)
    good, bad = driver.open([11, 12, 13]), driver.open([21, 22, 23])
    driver.step([(good, 3), (bad, 3)])
    driver.cache.layers[0][1][bad.blocks[0]] = torch.nan
    results = driver.step([(good, 1), (bad, 1)], on_device=True)
    assert results[0].error is None
    assert len(results[0].token_ids) == 1
    assert results[1].error is not None
    assert results[1].token_ids == ()


def test_inputs_of_a_padded_batch(device: torch.device) -> None:
    rows, width, block_size = 4, 8, 16
    seeds, positions = [0, 2**63 + 11, 12345], [0, 17, 100]
    header = torch.zeros(8, rows, dtype=torch.int32)
    words = np.array(seeds, dtype=np.uint64).view(np.int32).reshape(-1, 2)
    columns = {
        "slot": [2, 0, 5, 6],
        "position": [*positions, -1],
        "seed_low": [*words[:, 0].tolist(), 0],
        "seed_high": [*words[:, 1].tolist(), 0],
        "temperature": np.array([0.0, 0.7, 1.5, 0.0], np.float32).view(np.int32).tolist(),
    }
    for place, name in enumerate(HEADER_COLUMNS):
        header[place] = torch.tensor(columns[name], dtype=torch.int32)
    table = torch.arange(rows * width, dtype=torch.int32).view(rows, width) + 1
    table[3] = 0
    last_tokens = torch.arange(7) * 10
    made = {
        name: torch.full((rows,), -7, dtype=dtype, device=device)
        for name, dtype in (
            ("token_ids", torch.int64),
            ("positions", torch.int64),
            ("kv_lens", torch.int32),
            ("write_index", torch.int64),
            ("slots", torch.int64),
            ("temperatures", torch.float32),
        )
    }
    keys = torch.zeros(rows, 2, dtype=torch.int32, device=device)
    decode_inputs(header.to(device), table.to(device), last_tokens.to(device), block_size, keys=keys, **made)
    assert made["token_ids"].tolist() == [20, 0, 50, 60]
    assert made["positions"].tolist() == [0, 17, 100, 0]
    assert made["kv_lens"].tolist() == [1, 18, 101, 0]
    blocks = [int(table[row, position // block_size]) for row, position in enumerate(positions)]
    expected = [block * block_size + position % block_size for block, position in zip(blocks, positions, strict=True)]
    assert made["write_index"].tolist() == [*expected, 0]
    assert made["slots"].tolist() == columns["slot"]
    assert made["temperatures"].tolist() == pytest.approx([0.0, 0.7, 1.5, 0.0])
    new_positions = [position + 1 for position in positions]
    assert torch.equal(keys[:3].cpu(), noise_keys(seeds, new_positions, Purpose.TARGET))


def test_tokens_are_kept_by_slot_unless_their_logits_are_broken(device: torch.device) -> None:
    last_tokens = torch.full((6,), 9, device=device)
    kept = torch.zeros(4, dtype=torch.int64, device=device)
    largest = torch.tensor([1.5, torch.nan, torch.inf, -torch.inf], device=device)
    slots = torch.tensor([4, 0, 2, 1], device=device)
    keep_tokens(kept, last_tokens, torch.tensor([7, 8, 6, 5], device=device), largest, slots)
    assert kept.tolist() == [7, -1, -1, -1]
    assert last_tokens.tolist() == [0, 0, 0, 9, 7, 9]


def test_buckets_cover_every_batch_and_table() -> None:
    for most in (1, 3, 8, 17, 64, 100, 256, 1000):
        buckets = row_buckets(most)
        assert buckets == sorted(set(buckets))
        assert buckets[-1] >= min(most, MAX_ROWS)
        assert len(buckets) == 1 or buckets[-2] < most
    for blocks, block_size in ((1, 64), (8, 64), (32, 64), (33, 64), (2048, 64), (512, 16), (2, 256)):
        widths = table_widths(blocks, block_size)
        assert widths == sorted(set(widths))
        assert widths[-1] >= blocks
        assert all(width % 4 == 0 for width in widths)


@pytest.mark.parametrize(
    "other",
    [
        Row(1, 4, 1, True, (()), (5,)),
        Row(1, 4, 1, False, (())),
        Row(1, 4, 1, True, (()), write_start=16),
    ],
    ids=["a token from the host", "nothing to sample", "a private last token"],
)
def test_other_rows_than_decode_rows_have_no_graph(device: torch.device, reference: LoadedModel, other: Row) -> None:
    driver = PlanDriver(reference, num_blocks=40, block_size=16, max_slots=8)
    graphs = device_runner(driver, reference, device)._decode_graphs
    assert graphs is not None
    assert graphs.match([Row(0, 3, 1, True, (()))]) is not None
    assert graphs.match([Row(0, 3, 1, True, (())), other]) is None
