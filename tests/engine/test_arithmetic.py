"""KV and tokens are comparable only where the code that computes them is the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from engine.loader.arithmetic import COMPUTING, ENGINE, arithmetic_digest

CPU = torch.device("cpu")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    for package in COMPUTING:
        shutil.copytree(ENGINE / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "built"))
    return tmp_path


def test_the_same_code_elsewhere_has_the_same_digest(copied: Path) -> None:
    assert arithmetic_digest(CPU, copied) == arithmetic_digest(CPU)


@pytest.mark.parametrize("changed", ["kernels/norm.py", "cpu_ops/src/product.h", "models/llama.py"])
def test_changed_code_has_another_digest(copied: Path, changed: str) -> None:
    with (copied / changed).open("a") as file:
        file.write("\n")
    assert arithmetic_digest(CPU, copied) != arithmetic_digest(CPU)


def test_another_torch_has_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = arithmetic_digest(CPU)
    monkeypatch.setattr(torch, "__version__", "0.0.1")
    assert arithmetic_digest(CPU) != before
