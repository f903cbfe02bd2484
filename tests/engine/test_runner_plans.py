"""The runner does exactly what a plan says: slots, blocks, write_start, failures of one row, results in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.plan_driver import PlanDriver
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.loader.load import LoadedModel
from engine.plan import NewSlot, Row, StepPlan
from engine.protocol import KVGroupSpec, SamplingParams
from engine.runner.build import build_engine
from engine.runner.kv_cache import available_memory_bytes, count_blocks
from tests.support.loading import load
from tests.support.tiny_models import VOCAB_SIZE, write_tiny_llama

PROMPT = list(range(10, 50))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(directory: Path) -> LoadedModel:
    return load(directory)


@pytest.fixture
def new_driver(loaded: LoadedModel) -> Callable[..., PlanDriver]:
    def create(**settings: int) -> PlanDriver:
        return PlanDriver(loaded, **{"num_blocks": 40, "block_size": 16, "max_slots": 8, **settings})

    return create


def continuation(driver: PlanDriver, tokens: list[int], steps: int) -> list[int]:
    sequence = driver.open(tokens)
    driver.prefill(sequence, len(tokens))
    for _ in range(steps - 1):
        driver.step([(sequence, 1)], on_device=True)
    driver.close(sequence)
    return sequence.tokens[len(tokens) :]


def test_a_decode_row_continues_from_the_token_on_the_device(new_driver: Callable[..., PlanDriver]) -> None:
    driver = new_driver()
    expected = continuation(driver, PROMPT, 20)
    sequence = driver.open(PROMPT)
    driver.prefill(sequence, 9)
    for _ in range(19):
        driver.step([(sequence, 1)])  # the same tokens, told by the host
    assert sequence.tokens[len(PROMPT) :] == expected
    assert len(set(expected)) > 2  # a model that repeats itself would prove nothing


def test_results_of_several_steps_in_flight_come_in_step_order(new_driver: Callable[..., PlanDriver]) -> None:
    expected = continuation(new_driver(), PROMPT, 4)
    driver = new_driver(max_in_flight=3)
    assert driver.runner.max_in_flight == 3
    sequence = driver.open(PROMPT)
    driver.launch([(sequence, len(PROMPT))])
    for _ in range(3):
        driver.launch([(sequence, 1)], on_device=True)
    results = list(driver.runner.collect(block=True))
    while len(results) < 4:
        results += driver.runner.collect(block=True)
    assert [result.step for result in results] == [0, 1, 2, 3]
    assert [result.rows[0].token_ids[0] for result in results] == expected
    assert driver.runner.collect(block=False) == []
    assert driver.runner.collect(block=True) == []


def test_a_full_hit_recomputes_its_last_token_and_leaves_the_shared_block_alone(
    new_driver: Callable[..., PlanDriver],
) -> None:
    driver = new_driver()
    prompt = PROMPT[:32]  # two full blocks
    first = driver.open(prompt)
    driver.tap.clear()
    driver.prefill(first, 32)
    before = [(k[first.blocks[:2]].clone(), v[first.blocks[:2]].clone()) for k, v in driver.cache.layers]
    expected = driver.tap.take()[-1]
    hit = driver.open(prompt, cached=first, cached_tokens=32)
    assert (hit.computed, hit.write_start) == (31, 32)
    driver.step([(hit, 1)])
    torch.testing.assert_close(driver.tap.take()[-1], expected, rtol=0, atol=1e-5)
    for (k, v), (k_before, v_before) in zip(driver.cache.layers, before, strict=True):
        assert torch.equal(k[first.blocks[:2]], k_before)
        assert torch.equal(v[first.blocks[:2]], v_before)
        assert not k[0].any()  # the null block is clean again
        assert not v[0].any()


def test_a_slot_forgets_its_former_request(new_driver: Callable[..., PlanDriver]) -> None:
    driver = new_driver(max_slots=1)
    expected = continuation(driver, PROMPT, 5)
    continuation(driver, list(range(100, 200)), 30)
    assert continuation(driver, PROMPT, 5) == expected


def test_rows_without_sample_give_no_token(new_driver: Callable[..., PlanDriver]) -> None:
    driver = new_driver()
    first, second = driver.open(PROMPT), driver.open(PROMPT)
    results = driver.step([(first, 10), (second, len(PROMPT))])
    assert [len(row.token_ids) for row in results] == [0, 1]
    assert [row.slot for row in results] == [first.slot, second.slot]


@pytest.mark.parametrize("chunk", [40, 16, 7, 1])
def test_prompt_logprobs_of_all_chunks_are_those_of_the_whole(
    new_driver: Callable[..., PlanDriver], loaded: LoadedModel, chunk: int
) -> None:
    driver = new_driver()
    logits = driver.all_logits(PROMPT, len(PROMPT))
    expected = torch.log_softmax(logits[:-1].double(), dim=-1)[range(len(PROMPT) - 1), PROMPT[1:]]
    sequence = driver.open(PROMPT, prompt_logprobs=2)
    entries = []
    while sequence.computed < len(PROMPT):
        (result,) = driver.step([(sequence, min(chunk, len(PROMPT) - sequence.computed))])
        entries += result.prompt_logprobs or ()
    assert len(entries) == len(PROMPT) - 1
    assert [len(entry.top_ids) for entry in entries] == [2] * len(entries)
    torch.testing.assert_close(torch.tensor([entry.logprob for entry in entries]).double(), expected, rtol=0, atol=1e-4)
    (after,) = driver.step([(sequence, 1)], on_device=True)
    assert after.prompt_logprobs is None


def poison(driver: PlanDriver, block: int) -> None:
    for k_cache, v_cache in driver.cache.layers:
        k_cache[block] = torch.nan
        v_cache[block] = torch.nan


def test_a_row_that_is_not_finite_fails_alone(new_driver: Callable[..., PlanDriver]) -> None:
    driver = new_driver()
    expected = continuation(driver, PROMPT, 6)
    good, bad = driver.open(PROMPT), driver.open(PROMPT[::-1])
    driver.step([(bad, len(PROMPT)), (good, len(PROMPT))])
    poison(driver, bad.blocks[0])
    for _ in range(5):
        failed, fine = driver.step([(bad, 1), (good, 1)], on_device=True)
        assert failed.error is not None
        assert "finite" in failed.error
        assert failed.token_ids == ()
        assert fine.error is None
        bad.tokens.append(0)
    assert good.tokens[len(PROMPT) :] == expected


def test_a_block_that_held_nan_is_clean_for_its_next_owner(new_driver: Callable[..., PlanDriver]) -> None:
    expected = continuation(new_driver(), PROMPT, 20)
    driver = new_driver()
    for block in range(1, 40):
        poison(driver, block)
    assert continuation(driver, PROMPT, 20) == expected


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**40])
def test_a_token_outside_the_vocabulary_ends_its_own_request(new_driver: Callable[..., PlanDriver], token: int) -> None:
    driver = new_driver()
    expected = continuation(driver, PROMPT, 1)
    good, bad = driver.open(PROMPT), driver.open([1, token, 2])
    failed, fine = driver.step([(bad, 3), (good, len(PROMPT))])
    assert failed.error == f"a token id is outside the vocabulary of {VOCAB_SIZE}"
    assert list(fine.token_ids) == expected
    (only,) = driver.step([(driver.open([token]), 1)])  # a step of nothing else
    assert only.error is not None


def test_an_empty_plan_has_an_empty_result(loaded: LoadedModel, new_driver: Callable[..., PlanDriver]) -> None:
    runner = new_driver().runner
    runner.launch(StepPlan(7, ()))
    (result,) = runner.collect(block=True)
    assert (result.step, result.rows) == (7, ())


def test_drafts_are_refused_for_their_row_only(new_driver: Callable[..., PlanDriver]) -> None:
    runner = new_driver().runner
    sampling = SamplingParams(temperature=0.0, seed=0)
    rows = (Row(0, 0, 2, True, ((1,),), (5, 6), drafts=(7,)), Row(1, 0, 2, True, ((2,),), (5, 6)))
    runner.launch(StepPlan(0, rows, tuple(NewSlot(slot, 2, sampling) for slot in (0, 1))))
    (result,) = runner.collect(block=True)
    assert result.rows[0].error is not None
    assert len(result.rows[1].token_ids) == 1


def test_the_engine_describes_what_was_built(directory: Path) -> None:
    config = EngineConfig(
        model=str(directory),
        device="cpu",
        operators="torch",
        block_size=32,
        kv_cache_memory_bytes=1 << 20,
        threads=1,
        max_running=4,
    )
    info, runner, num_blocks, assets = build_engine(config, lambda fraction, phase: None)
    block_bytes = 2 * 2 * 2 * 16 * 32 * 2  # k and v, layers, kv heads, head_dim, tokens, bfloat16
    assert num_blocks == ((1 << 20) // block_bytes,)
    assert info.kv_capacity_tokens == (num_blocks[0] - 1) * 32
    assert (info.dtype, info.device, info.operators, info.max_model_len) == ("bfloat16", "cpu", "torch", 512)
    assert info.text.tokenizer.digest in assets
    assert info.kv_groups[0].layers == (0, 1)
    assert runner.max_in_flight == 1
    runner.close()


def test_a_cache_too_small_for_one_sequence_says_what_would_fit(directory: Path) -> None:
    config = EngineConfig(model=str(directory), device="cpu", kv_cache_memory_bytes=100_000, threads=1)
    with pytest.raises(ConfigError, match=r"max_model_len 512 needs \d+ bytes .* is 100000 bytes") as caught:
        build_engine(config, lambda fraction, phase: None)
    assert caught.value.hint is not None
    assert "--max-model-len 320" in caught.value.hint  # 6 blocks of 16384 bytes, one of them the null block
    group = KVGroupSpec(layers=(0, 1), kv_heads=2, head_dim=16)
    limits = {"block_size": 64, "dtype": torch.bfloat16, "max_model_len": 320, "max_running": 64}
    assert count_blocks(6 * 16384, [group], **limits) == (6,)  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [("block_size", 48), ("threads", 0)])
def test_an_impossible_setting_is_named(directory: Path, field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field} {value}"):
        build_engine(EngineConfig(model=str(directory), device="cpu", **{field: value}), lambda f, p: None)  # type: ignore[arg-type]


def test_available_memory_is_the_smaller_of_machine_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    assert available_memory_bytes(meminfo, tmp_path) == 2048 * 1024
    (tmp_path / "memory.max").write_text("1048576\n")
    (tmp_path / "memory.current").write_text("48576\n")
    assert available_memory_bytes(meminfo, tmp_path) == 1_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(meminfo, tmp_path) == 2048 * 1024
