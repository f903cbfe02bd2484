"""Models by the architecture name that Hugging Face configurations carry."""

from __future__ import annotations

from engine.models.llama import Llama
from engine.models.llama_config import ARCHITECTURES

MODELS = dict.fromkeys(ARCHITECTURES, Llama)
