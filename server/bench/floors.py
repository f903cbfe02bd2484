"""The least time a workload can take: bytes over the measured bandwidth, operations over the measured matrix rate.

A step reads every matrix once and the KV of all tokens before it; activations are left out. Knows no engine.
"""

from __future__ import annotations

import msgspec

from engine.models.llama_config import LlamaConfig
from server.bench.workloads import Workload


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """engine/runner/ceilings.py's result."""

    device: str
    torch_version: str
    copy_tb_s: float
    matmul_tflop_s: float
    products_ms: dict[str, float] = {}


class ModelCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes in bfloat16, but for layers' weights and KV in 8 bits; operations are two per multiplication."""

    layer_parameters: int
    head_parameters: int
    kv_bytes_per_token: int
    attention_flops_per_pair: int
    layer_weight_bytes: int = 2

    @classmethod
    def of(cls, config: LlamaConfig, layer_weight_bytes: int = 2, kv_bytes: int = 2) -> ModelCosts:
        query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        layer = config.hidden_size * (2 * query + 2 * kv + 3 * config.intermediate_size)
        return cls(
            layer_parameters=config.layers * layer,
            head_parameters=config.vocab_size * config.hidden_size,
            kv_bytes_per_token=2 * kv_bytes * config.layers * kv,
            attention_flops_per_pair=4 * config.layers * query,
            layer_weight_bytes=layer_weight_bytes,
        )

    @property
    def weight_bytes(self) -> int:
        return self.layer_weight_bytes * self.layer_parameters + 2 * self.head_parameters

    def decode_step_s(self, batch: int, context: int, ceilings: Ceilings) -> float:
        read_s = (self.weight_bytes + batch * context * self.kv_bytes_per_token) / (ceilings.copy_tb_s * 1e12)
        flops = batch * (2 * (self.layer_parameters + self.head_parameters) + self.attention_flops_per_pair * context)
        return max(read_s, flops / (ceilings.matmul_tflop_s * 1e12))

    def prefill_s(self, lengths: list[int], ceilings: Ceilings) -> float:
        flops = sum(
            2 * self.layer_parameters * length
            + self.attention_flops_per_pair * length * (length + 1) // 2
            + 2 * self.head_parameters
            for length in lengths
        )
        return flops / (ceilings.matmul_tflop_s * 1e12)

    def workload_s(self, workload: Workload, ceilings: Ceilings) -> float:
        """Return the least time of prompts first and then all decode steps, each as long as its batch demands."""
        lengths = [len(request.prompt_ids) for request in workload.requests]
        outputs = [request.sampling.max_tokens or 0 for request in workload.requests]
        total_s = self.prefill_s(lengths, ceilings)
        for step in range(1, max(outputs)):
            kv_tokens = sum(length + step for length, count in zip(lengths, outputs, strict=True) if count > step)
            total_s += (self.weight_bytes + kv_tokens * self.kv_bytes_per_token) / (ceilings.copy_tb_s * 1e12)
        return total_s
