"""Tests share their cores with other tests: one thread computes faster there than a team that waits for each other."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
