"""What a model's files are once opened, whatever their format: a shape, tensors by name, and the text assets.

Formats implement `Checkpoint`; engine/loader/load.py is their only reader. Tensor names are Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.models.llama_config import LlamaConfig

if TYPE_CHECKING:
    from torch import Tensor


class Digest(Protocol):
    """The part of hashlib's objects that readers use."""

    def update(self, data: bytes | memoryview, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """Bytes of tokenizer.json and of the chat template, and what else text needs."""

    tokenizer: bytes
    chat_template: bytes | None = None
    bos_id: int | None = None
    add_bos: bool = False
    special_tokens: dict[str, str] = field(default_factory=dict)


class Checkpoint(Protocol):
    """An open model. Who opened it closes it, once every tensor is read."""

    @property
    def path(self) -> Path: ...

    @property
    def architecture(self) -> str: ...

    @property
    def config(self) -> LlamaConfig: ...

    @property
    def text(self) -> TextFiles: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def generation_defaults(self) -> dict[str, float | int]: ...

    @property
    def tensor_names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return what the file says of a tensor; nothing of it is read. Raises ModelError."""
        ...

    def read(self, name: str, digest: Digest) -> Tensor:
        """Return one tensor on the CPU and add its stored bytes to `digest`. Raises ModelError."""
        ...

    def close(self) -> None: ...
