"""The guard against hidden waits, and launch code under it. On a CPU nothing waits, but the operators are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.plan_driver import PlanDriver
from engine.plan import NewSlot
from engine.protocol import SamplingParams
from engine.runner.wait_guard import HiddenWaitError, forbid_waits
from engine.sampler.sampler import Sampler
from tests.support.loading import load
from tests.support.row_masks import row_masks
from tests.support.tiny_models import VOCAB_SIZE, write_tiny_llama

CPU = torch.device("cpu")

WAITING: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "truth of a tensor": lambda x: bool((x > 0).all()),
    "int of a tensor": lambda x: int(x[0]),
    "nonzero": lambda x: torch.nonzero(x),
    "where with one argument": lambda x: torch.where(x > 0),
    "a mask as index": lambda x: x[x > 0],
    "a mask as index of an assignment": lambda x: x.__setitem__(x > 0, torch.zeros(1)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "equal": lambda x: torch.equal(x, x + 1),
    "unique": lambda x: x.unique(),
}
FREE: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x * 2 + 1).argmax(),
    "integers as index": lambda x: x[torch.tensor([1, 0])],
    "an assignment by integers": lambda x: x.__setitem__(torch.tensor([1, 0]), torch.ones(2)),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "copies on the device": lambda x: x.to(torch.float64).clone(),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_an_error_inside_and_only_there(name: str, inference: bool) -> None:
    x = torch.tensor([1.0, 2.0, -3.0])
    with torch.inference_mode(inference):
        with pytest.raises(HiddenWaitError), forbid_waits(CPU):
            WAITING[name](x)
        WAITING[name](x)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", FREE)
def test_what_does_not_wait_goes_through(name: str, inference: bool) -> None:
    with torch.inference_mode(inference), forbid_waits(CPU):
        FREE[name](torch.tensor([1.0, 2.0, -3.0]))


def test_only_the_named_device_is_watched() -> None:
    with forbid_waits(torch.device("meta")):
        assert torch.tensor([3]).item() == 3
        with pytest.raises(HiddenWaitError):
            torch.empty(2, device="meta").sum().item()


@pytest.mark.parametrize("inference", [False, True])
def test_a_blocking_copy_to_or_off_the_device_is_an_error(inference: bool) -> None:
    x, host = torch.empty(2, device="meta"), torch.zeros(2)
    leaving = (lambda: x.to("cpu"), lambda: x.cpu(), lambda: host.copy_(x))
    arriving = (lambda: host.to("meta"), lambda: x.copy_(host))
    for copy in (*leaving, *arriving):
        with torch.inference_mode(inference), pytest.raises(HiddenWaitError), forbid_waits(torch.device("meta")):
            copy()
    with forbid_waits(torch.device("meta")):
        x.copy_(host, non_blocking=True)


def test_masks_reach_the_device_by_the_senders_way_alone() -> None:
    def send(*arrays: NDArray[Any]) -> list[Tensor]:
        hosts = [torch.from_numpy(array) for array in arrays]
        return [torch.empty_like(host, device="meta").copy_(host, non_blocking=True) for host in hosts]

    device, sampling = torch.device("meta"), SamplingParams(temperature=0.0, seed=0)
    sampler = Sampler(4, 50, device, send=send, one_launch=False)
    for slot in range(3):
        sampler.set_slot(NewSlot(slot, 5, sampling))
    for rows in ({0: [7]}, {0: [7], 2: [8, 9]}, {0: [7], 1: [8], 2: [9]}):
        with forbid_waits(device):
            sampled = sampler.sample(torch.empty(3, 50, device=device), [0, 1, 2], [5, 5, 5], row_masks(rows, 50))
        assert sampled.token_ids.shape == (3,)


def test_launching_a_step_does_not_wait(tmp_path: Path) -> None:
    """Prompts in chunks, mixed steps and decode steps, greedy and with temperature, with masks and without."""
    driver = PlanDriver(load(write_tiny_llama(tmp_path)), num_blocks=40, block_size=16, max_slots=8)
    greedy = driver.open(list(range(10, 50)))
    warm = driver.open(list(range(60, 90)), sampling=SamplingParams(temperature=0.8, seed=3))
    steps = [[(greedy, 7)], [(greedy, 33), (warm, 11)], [(greedy, 1), (warm, 19)], [(greedy, 1), (warm, 1)]]
    mask = row_masks({0: [40, 41]}, VOCAB_SIZE)
    tokens = 0
    for wanted, masks in zip(steps, (None, mask, mask, None), strict=True):
        with forbid_waits(CPU):
            driver.launch(wanted, on_device=True, masks=masks)
        (result,) = driver.runner.collect(block=True)
        assert all(row.error is None for row in result.rows)
        tokens += sum(len(row.token_ids) for row in result.rows)
    assert tokens == 5
