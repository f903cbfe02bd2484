"""Memory of the KV cache: how many blocks fit, and the tensors themselves.

Owns the promise that back ends of plain torch operators rely on: what no request has written is finite. New blocks are
cleared when they are handed out (a former owner may have left NaN), and the null block after every step that wrote to
it. Fused back ends need no such promise, and then nothing is cleared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.plan import NULL_BLOCK
from engine.protocol import KVGroupSpec

CPU_DEFAULT_BYTES = 1 << 30
CUDA_SHARE = 0.9
CUDA_HEADROOM_BYTES = 1 << 30
"""Left on a CUDA device for activations, logits and the sampler."""


def block_bytes(group: KVGroupSpec, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one block of the group takes, over all its layers."""
    return 2 * len(group.layers) * group.kv_heads * group.head_dim * block_size * dtype.itemsize


def default_budget_bytes(device: torch.device, local_engines: int = 1) -> int:
    """Return one engine's part of what is free, when `local_engines` share the machine and its GPUs."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        sharing = -(-local_engines // torch.cuda.device_count())
        return max(int(free * CUDA_SHARE / sharing) - CUDA_HEADROOM_BYTES, 0)
    return min(CPU_DEFAULT_BYTES, available_memory_bytes() // (4 * local_engines))


def available_memory_bytes(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return what the machine and the container both have left; a machine that does not say counts as having plenty."""
    limits = [CPU_DEFAULT_BYTES * 4]
    try:
        fields = dict(line.split(":", 1) for line in proc.read_text().splitlines() if ":" in line)
        limits = [int(fields["MemAvailable"].split()[0]) * 1024]
    except (OSError, KeyError, ValueError):
        pass  # not Linux
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            limits.append(max(int(limit) - int(used), 0))
    except (OSError, ValueError):
        pass  # no cgroup v2
    return min(limits)


def count_blocks(
    budget_bytes: int,
    groups: Sequence[KVGroupSpec],
    *,
    block_size: int,
    dtype: torch.dtype,
    max_model_len: int,
    max_running: int,
) -> tuple[int, ...]:
    """Return the blocks of each group (the null block included) that the budget holds together.

    All groups get the same number, since short sequences need as many in each; but a window group beside a full one
    gets no more than all slots can have in use, and the full groups get the rest. Raises ConfigError when one sequence
    does not fit.
    """
    sizes = [block_bytes(group, block_size, dtype) for group in groups]
    needed = [_blocks_of_one(group, block_size, max_model_len) + 1 for group in groups]
    needed_bytes = sum(blocks * size for blocks, size in zip(needed, sizes, strict=True))
    if needed_bytes > budget_bytes:
        raise _too_small(budget_bytes, needed_bytes, groups, block_size, dtype, max_model_len)
    equal = budget_bytes // sum(sizes)
    full = [index for index, group in enumerate(groups) if group.window_tokens is None]
    if not full:
        return (equal,) * len(groups)
    counts = [min(max(equal, least), (least - 1) * max_running + 1) for least in needed]
    rest = budget_bytes - sum(counts[i] * sizes[i] for i in range(len(groups)) if i not in full)
    for index in full:
        counts[index] = rest // sum(sizes[i] for i in full)
    return tuple(counts)


def _blocks_of_one(group: KVGroupSpec, block_size: int, tokens: int) -> int:
    """Return the blocks that a sequence alone needs: a window's are freed behind it, all but one block to write to."""
    blocks = -(-tokens // block_size)
    if group.window_tokens is None:
        return blocks
    return min(blocks, -(-group.window_tokens // block_size) + 1)


def _too_small(
    budget_bytes: int,
    needed_bytes: int,
    groups: Sequence[KVGroupSpec],
    block_size: int,
    dtype: torch.dtype,
    max_model_len: int,
) -> ConfigError:
    longest = max(budget_bytes // sum(block_bytes(group, block_size, dtype) for group in groups) - 1, 0) * block_size
    return ConfigError(
        f"one sequence of max_model_len {max_model_len} needs {needed_bytes} bytes of KV cache,"
        f" but kv_cache_memory is {budget_bytes} bytes",
        hint=f"Use --max-model-len {longest} or less, or --kv-cache-memory {needed_bytes}."
        if longest
        else f"Use --kv-cache-memory {needed_bytes}.",
    )


class KVCache:
    """One pair of tensors per layer, [blocks of its group, kv_heads, block_size, head_dim]."""

    def __init__(
        self,
        groups: Sequence[KVGroupSpec],
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        keeps_finite: bool = True,
    ) -> None:
        self.keeps_finite = keeps_finite
        by_layer: dict[int, tuple[Tensor, Tensor]] = {}
        self._of_group: list[list[Tensor]] = []
        for group, count in zip(groups, num_blocks, strict=True):
            shape = (count, group.kv_heads, block_size, group.head_dim)
            # Not zeroed as a whole: pages that no request reaches are never touched.
            pairs = [(_empty(shape, dtype, device), _empty(shape, dtype, device)) for _ in group.layers]
            by_layer.update(zip(group.layers, pairs, strict=True))
            self._of_group.append([tensor for pair in pairs for tensor in pair])
        self.layers = [by_layer[layer] for layer in sorted(by_layer)]
        self.clear_null_block()

    def clear(self, group: int, blocks: Sequence[int]) -> None:
        """Zero blocks of a group that a request is about to write."""
        if not self.keeps_finite:
            return
        for tensor in self._of_group[group]:
            for block in blocks:
                tensor[block].zero_()

    def clear_null_block(self) -> None:
        for group in range(len(self._of_group)):
            self.clear(group, (NULL_BLOCK,))


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
