"""Kernel tests run on the GPU where there is one, and otherwise in Triton's interpreter on the CPU.

The interpreter is chosen when a kernel is defined, so the switch stands before the first import of triton; bfloat16
products are wrong there, hence float32 and float16.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "triton was imported too early"
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")


def _repair_loop_bounds() -> None:
    """Triton below 3.9 turns a bound of range() into an int in a way that numpy from 2.4 on refuses."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: object, scope: interpreter._LangPatchScope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index


_repair_loop_bounds()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
