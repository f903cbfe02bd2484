"""Weights in the order in which the C++ product reads them (src/product.h), and back.

A panel is 2 * lanes outputs. Its memory goes through the inputs; of bfloat16 two inputs of one output lie side by side.
A gate and its up projection share panels, a vector of each, so that one product has both for the multiplication after.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cpu_ops.abi import ElementType

ELEMENT_TYPES = {torch.float32: ElementType.FLOAT32, torch.bfloat16: ElementType.BFLOAT16}
"""What the operators take weights and KV in."""

_HUGE_PAGE_BYTES = 2 << 20


GROUP = 32
"""Inputs that share a scale when a row or a weight is quantised to 8 bits."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """`words` holds [panels, words of a row, 2, lanes]: float32, pairs of bfloat16, or, of int8, for each group of
    inputs a correction, the weights' scale and then fours of weights. What a panel has too many is 0."""

    words: Tensor
    type: ElementType
    outputs: int
    inputs: int
    lanes: int
    paired: bool

    def values(self) -> Tensor:
        """Return [outputs, inputs], a copy: of int8 what they stand for, float32."""
        rows = _from_panels(self.words, self.outputs, self.lanes, self.paired)
        if self.type == ElementType.FLOAT32:
            return rows
        if self.type == ElementType.BFLOAT16:
            return rows.view(torch.bfloat16)[:, : self.inputs].contiguous()
        groups = rows.view(self.outputs, -1, 2 + GROUP // 4)
        scales = groups[:, :, 1:2].contiguous().view(torch.float32)
        values = groups[:, :, 2:].contiguous().view(torch.int8) * scales
        return values.view(self.outputs, -1)[:, : self.inputs].contiguous()


def pack(weight: Tensor, lanes: int, *, paired: bool = False) -> PackedWeight:
    """Pack float32 or bfloat16 [outputs, inputs]. With `paired` its halves are a gate and what it multiplies."""
    outputs, inputs = weight.shape
    words = weight
    if weight.dtype == torch.bfloat16:
        words = _padded(weight, 2).view(torch.int32)
    return PackedWeight(_into_panels(words, lanes, paired), ELEMENT_TYPES[weight.dtype], outputs, inputs, lanes, paired)


def pack_int8(weight: Tensor, lanes: int, *, paired: bool = False) -> PackedWeight:
    """Quantise [outputs, inputs] with one scale for each output and group of inputs, and pack it."""
    outputs, inputs = weight.shape
    values = _padded(weight.float(), GROUP).view(outputs, -1, GROUP)
    scales = values.abs().amax(dim=2, keepdim=True) / 127
    whole = (values / scales.clamp(min=1e-30)).round().to(torch.int8)
    # A row of x is bytes of q + 128, so the sums have 128 times the group's weights too many.
    correction = whole.sum(dim=2, keepdim=True, dtype=torch.int32) * -128
    words = torch.cat((correction, scales.view(torch.int32), whole.view(torch.int32)), dim=2).view(outputs, -1)
    return PackedWeight(_into_panels(words, lanes, paired), ElementType.INT8, outputs, inputs, lanes, paired)


def _padded(rows: Tensor, unit: int) -> Tensor:
    """Return the rows with zeros behind them up to a multiple of `unit`."""
    short = -rows.shape[1] % unit
    return torch.nn.functional.pad(rows, (0, short)) if short else rows.contiguous()


def _into_panels(words: Tensor, lanes: int, paired: bool) -> Tensor:
    """Return [outputs, words] of 4 bytes as [panels, words, 2, lanes], flat."""
    outputs, row_words = words.shape
    halves = 2 if paired else 1
    width = 2 * lanes // halves
    panels = -(-outputs // halves // width)
    flat = zeros_in_pages(panels * row_words * 2 * lanes, words.dtype)
    shaped = flat.view(panels, row_words, halves, width)
    # One half after the other into its place: the whole is never there a third time.
    for half, part in enumerate(words.chunk(halves)):
        whole = len(part) // width
        shaped[:whole, :, half].copy_(part[: whole * width].view(whole, width, row_words).transpose(1, 2))
        if whole < panels:
            rest = part[whole * width :].T
            shaped[whole, :, half, : rest.shape[1]] = rest
    return flat


def _from_panels(flat: Tensor, outputs: int, lanes: int, paired: bool) -> Tensor:
    """Undo `_into_panels`."""
    halves = 2 if paired else 1
    width = 2 * lanes // halves
    panels = -(-outputs // halves // width)
    rows = flat.view(panels, -1, halves, width).permute(2, 0, 3, 1).reshape(halves, panels * width, -1)
    return rows[:, : outputs // halves].reshape(outputs, -1).clone(memory_format=torch.contiguous_format)


def pack_bias(bias: Tensor, lanes: int, *, paired: bool = False) -> Tensor:
    """Return a bias as float32 in the order of the panels' outputs."""
    if not paired:
        return torch.nn.functional.pad(bias.float(), (0, -len(bias) % (2 * lanes))).contiguous()
    gate, up = (torch.nn.functional.pad(part.float(), (0, -len(part) % lanes)) for part in bias.chunk(2))
    return torch.stack((gate.view(-1, lanes), up.view(-1, lanes)), dim=1).flatten()


def zeros_in_pages(count: int, dtype: torch.dtype) -> Tensor:
    """Return [count] of zeros in pages of 2 MiB where the system has them: weights are read from end to end."""
    size = count * dtype.itemsize
    if size < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(count, dtype=dtype)
    pages = mmap.mmap(-1, size + _HUGE_PAGE_BYTES)
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return torch.zeros(count, dtype=dtype)  # a system without them
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[start : start + size].view(dtype)
