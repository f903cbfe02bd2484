"""Models by the architecture name that Hugging Face configurations carry."""

from __future__ import annotations

from engine.models.llama import Llama

MODELS = dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"), Llama)
