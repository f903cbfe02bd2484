"""The compiled operators in tests: skipped where there is no compiler, on every instruction set that is here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from torch import Tensor

from engine.cpu_ops.build import build
from engine.cpu_ops.library import Library, load_library
from engine.cpu_ops.program import Program
from engine.errors import ConfigError

INSTRUCTION_SETS = ("avx512vnni", "avx512", "avx2", "generic")
PADDING = 5
"""Columns behind a buffer's own, which no operator may touch or use."""


def library_or_skip() -> Library:
    try:
        return load_library()
    except ConfigError as error:
        pytest.skip(str(error))


@cache
def _library_for_any_processor() -> Library:
    """Not the one that models run on: what one test chooses is nothing to others."""
    return Library(build())


@contextmanager
def on_instruction_set(name: str) -> Iterator[Library]:
    try:
        library = _library_for_any_processor()
    except ConfigError as error:
        pytest.skip(str(error))
    if not library.use(name):
        pytest.skip(f"this processor has no {name}")
    yield library


def program(library: Library, buffers: int, threads: int = 1) -> Program:
    """A program whose buffers all come with each run."""
    return Program(library, (0,) * buffers, threads)


def poisoned(values: Tensor) -> Tensor:
    """Return a float32 copy of [rows, width] that is a part of wider rows of NaN."""
    wide = torch.full((values.shape[0], values.shape[1] + PADDING), torch.nan)
    view = wide[:, : values.shape[1]]
    view.copy_(values)
    return view


def untouched(view: Tensor) -> bool:
    """Tell whether what lies behind a buffer from `poisoned` is still NaN."""
    rows, width = view.shape
    behind = view.as_strided((rows, PADDING), view.stride(), view.storage_offset() + width)
    return bool(behind.isnan().all())
