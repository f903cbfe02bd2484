"""Settings of one engine: read once, checked, frozen, and sent to its process as it is. Knows no files and no flags."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.protocol import Numerics

DType = Literal["auto", "bfloat16", "float16", "float32"]
DeviceName = Literal["auto", "cpu", "cuda"]
OperatorSet = Literal["auto", "cpp", "torch"]
WeightFormat = Literal["dtype", "int8", "fp8"]
KVFormat = Literal["dtype", "fp8"]
LoadRule = Literal["auto", "always"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`None` and "auto" are resolved when the model is loaded; EngineInfo tells what came out.

    `model` is a directory, a GGUF file, a packaged model's name or a hub's org/name. `kv_cache_memory_bytes` bounds the
    device's KV pool. `max_step_tokens` is the token budget of one step, `max_running` the number of slots (None: what
    the device is good for), `max_waiting` the bound of the queue. `operators` is for a CPU: "auto" is "cpp" where there
    is a compiler, or what one has made, and the dtype is bfloat16 or float32. `weights` "int8" needs "cpp",
    "fp8" is for GPUs, and on a CPU for trials with the operators of torch; so is `kv_dtype` "fp8".
    `in_flight_steps` 1 is the synchronous loop, 2 schedules a step while the one before it runs; None is 2 on a GPU and
    1 on a CPU. `kv_store` has a text for each tier of the KV store (kvstore/manager/config.py), of which each tenant
    gets at most `kv_quota_bytes`; what leaves memory is encrypted with the secret of `kv_secret_file`, and
    `kv_load` "auto" loads what is found where that is predicted to be faster than computing it. `local_engines`
    share this machine, and this is the one of number `local_index`: what is not set is chosen so that there is room for
    all of them.
    """

    model: str = "smollm2"
    served_model_name: str | None = None
    dtype: DType = "auto"
    numerics: Numerics = "default"
    device: DeviceName = "auto"
    operators: OperatorSet = "auto"
    weights: WeightFormat = "dtype"
    max_model_len: int | None = None
    block_size: int = 64
    kv_dtype: KVFormat = "dtype"
    kv_cache_memory_bytes: int | None = None
    max_running: int | None = None
    max_waiting: int = 4096
    max_step_tokens: int | None = None
    in_flight_steps: int | None = None
    prefix_cache: bool = True
    threads: int | None = None
    chat_template: str | None = None
    kv_store: tuple[str, ...] = ()
    kv_quota_bytes: int | None = None
    kv_secret_file: str | None = None
    kv_load: LoadRule = "auto"
    local_index: int = 0
    local_engines: int = 1
