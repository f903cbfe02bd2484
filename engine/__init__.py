"""One replica's inference engine: requests, scheduler, KV blocks, models, kernels, sampler, text.

Offline use: `from engine import LLM, Grammar, SamplingParams`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.protocol import Grammar, SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM as LLM

__all__ = ["LLM", "Grammar", "SamplingParams"]


def __getattr__(name: str) -> object:
    """Import LLM at first use: `import engine` stays free of torch."""
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
