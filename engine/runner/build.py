"""Composes an engine's device side from its configuration: threads, model, KV cache, runner, and its description."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch

from engine.attention.base import FusedAttention
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError, RequestError
from engine.layers.fp8 import FP8
from engine.loader.load import LoadedModel, OnText, choose_device, load_model
from engine.models.base import Model
from engine.models.llama import Llama
from engine.protocol import EngineInfo, GenerateRequest, KVGroupSpec, SamplingParams
from engine.runner.kv_cache import KVCache, count_blocks, default_budget_bytes
from engine.runner.runner import TorchRunner
from engine.validation import validate

if TYPE_CHECKING:
    from engine.runner.rehearsal import Rehearsal

BLOCK_SIZES = (16, 32, 64, 128, 256)

LARGE_GPU_BYTES = 40 << 30


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Requests that run at once, and the token budget of a step."""

    running: int
    tokens: int


CPU_SIZES, GPU_SIZES, LARGE_GPU_SIZES = StepSizes(64, 1024), StepSizes(256, 2048), StepSizes(256, 8192)
"""A GPU reads its weights once for all rows of a step. Activations are of all tokens of one: 8192 of an 8B model take
a GiB."""


def build_engine(
    config: EngineConfig,
    on_progress: Callable[[float, str], None],
    on_text: OnText = lambda codec, vocab_size, eos_ids: None,
) -> tuple[EngineInfo, TorchRunner, tuple[int, ...], dict[str, bytes]]:
    """Return the engine's description, its runner, the blocks of each KV group (null block included) and text assets.

    `on_text` is called before the weights are read. Raises ConfigError and ModelError with one line for the user;
    whatever `on_progress` raises passes through.
    """
    if config.block_size not in BLOCK_SIZES:
        raise ConfigError(f"block_size {config.block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}")
    threads = _set_threads(config)
    _choose_gpu(config)
    sizes = step_sizes(config)
    count = partial(_count_blocks, config, sizes)
    rehearsals: list[Rehearsal] = []

    def on_built(module: Llama, max_model_len: int) -> None:
        if module.is_fused and module.embedding.device.type == "cuda":
            rehearsals.append(_rehearse(config, sizes, module, max_model_len))

    loaded = load_model(config, on_progress, check_room=count, on_text=on_text, on_built=on_built)
    for rehearsal in rehearsals:
        on_progress(0.0, "compiling kernels")
        rehearsal.wait()
    num_blocks = count(loaded.kv_groups, loaded.kv_dtype, loaded.max_model_len)
    try:
        cache = KVCache(
            loaded.kv_groups,
            num_blocks,
            config.block_size,
            loaded.kv_dtype,
            loaded.device,
            keeps_finite=not loaded.ignores_unwritten_kv,
        )
    except RuntimeError as error:  # torch's word for what cannot be allocated
        raise ConfigError(
            f"the KV cache of {max(num_blocks)} blocks cannot be allocated: {str(error).splitlines()[0]}",
            hint="Use a smaller --kv-cache-memory.",
        ) from error
    runner = _make_runner(
        config,
        sizes,
        loaded.max_model_len,
        loaded.vocab_size,
        loaded.module,
        cache,
        graphs=loaded.device.type == "cuda" and isinstance(loaded.backend, FusedAttention),
    )
    runner.warm_up(on_progress)
    info = _describe(config, sizes, loaded, num_blocks, threads)
    _check_defaults(info)
    return info, runner, num_blocks, loaded.assets


def _make_runner(
    config: EngineConfig,
    sizes: StepSizes,
    max_model_len: int,
    vocab_size: int,
    model: Model,
    cache: KVCache,
    *,
    graphs: bool,
) -> TorchRunner:
    device = cache.layers[0][0].device
    return TorchRunner(
        model,
        cache,
        block_size=config.block_size,
        max_slots=sizes.running,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        device=device,
        max_in_flight=config.in_flight_steps or (2 if device.type == "cuda" else 1),
        max_step_tokens=sizes.tokens,
        graphs=graphs,
    )


def _rehearse(config: EngineConfig, sizes: StepSizes, module: Llama, max_model_len: int) -> Rehearsal:
    from engine.runner.rehearsal import Rehearsal

    vocab_size = module.config.vocab_size
    make = partial(_make_runner, config, sizes, max_model_len, vocab_size, graphs=True)
    kv_dtype = FP8 if config.kv_dtype == "fp8" else module.embedding.dtype
    return Rehearsal(module, make, config.block_size, kv_dtype, config.local_engines)


def _check_defaults(info: EngineInfo) -> None:
    """Sampling defaults come with the model. Wrong ones would be held against every request."""
    sampling = msgspec.convert(info.generation_defaults, SamplingParams)
    try:
        validate(GenerateRequest(request_id="defaults", prompt_ids=[0], sampling=sampling), info)
    except RequestError as error:
        raise ModelError(
            f"The model's own sampling defaults are wrong: {error}.", hint="Is its generation_config.json all right?"
        ) from error


def _choose_gpu(config: EngineConfig) -> None:
    """Local engines take the GPUs in turn."""
    if choose_device(config.device).type == "cuda":
        torch.cuda.set_device(config.local_index % torch.cuda.device_count())


def step_sizes(config: EngineConfig) -> StepSizes:
    """Return the sizes of a step: what is set, otherwise what the device is good for."""
    default = CPU_SIZES
    if choose_device(config.device).type == "cuda":
        memory = torch.cuda.get_device_properties().total_memory
        default = LARGE_GPU_SIZES if memory >= LARGE_GPU_BYTES else GPU_SIZES
    return StepSizes(config.max_running or default.running, config.max_step_tokens or default.tokens)


def _set_threads(config: EngineConfig) -> int:
    count = config.threads
    if count is None:
        count = max(1, len(os.sched_getaffinity(0)) // config.local_engines)
    if count < 1:
        raise ConfigError(f"threads {count} is not positive")
    torch.set_num_threads(count)
    return count


def _count_blocks(
    config: EngineConfig, sizes: StepSizes, groups: tuple[KVGroupSpec, ...], dtype: torch.dtype, max_model_len: int
) -> tuple[int, ...]:
    budget = config.kv_cache_memory_bytes
    if budget is None:
        budget = default_budget_bytes(choose_device(config.device), config.local_engines)
    return count_blocks(
        budget,
        groups,
        block_size=config.block_size,
        dtype=dtype,
        max_model_len=max_model_len,
        max_running=sizes.running,
    )


def _capacity_tokens(config: EngineConfig, loaded: LoadedModel, num_blocks: tuple[int, ...]) -> int:
    """Return how many tokens the cache holds at once. Windows alone bound no sequence: there it is at least one's."""
    counts = [count for group, count in zip(loaded.kv_groups, num_blocks, strict=True) if group.window_tokens is None]
    tokens = (min(counts or num_blocks) - 1) * config.block_size
    return tokens if counts else max(tokens, loaded.max_model_len)


def _describe(
    config: EngineConfig, sizes: StepSizes, loaded: LoadedModel, num_blocks: tuple[int, ...], threads: int
) -> EngineInfo:
    return EngineInfo(
        model=config.served_model_name or config.model,
        incarnation=secrets.token_hex(8),
        weights_digest=loaded.weights_digest,
        config_digest=loaded.config_digest,
        arithmetic=loaded.arithmetic,
        architecture=loaded.architecture,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=loaded.device.type,
        numerics=config.numerics,
        operators=loaded.operators,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_ids=loaded.eos_ids,
        block_size=config.block_size,
        kv_groups=loaded.kv_groups,
        kv_capacity_tokens=_capacity_tokens(config, loaded, num_blocks),
        max_running=sizes.running,
        max_step_tokens=sizes.tokens,
        text=loaded.text,
        generation_defaults=loaded.generation_defaults,
        threads=threads,
        kv_dtype="" if loaded.kv_dtype == loaded.dtype else str(loaded.kv_dtype).removeprefix("torch."),
    )
