"""A Hugging Face directory with safetensors weights, in one file or in shards with an index, seen as a checkpoint."""

from __future__ import annotations

import struct
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.loader.checkpoint import Digest
from engine.loader.files import open_regular
from engine.loader.hf_config import architecture_of, decoder_config, sampling_defaults
from engine.loader.hf_text import all_eos_ids, read_text
from engine.loader.json_file import JsonFile
from engine.loader.shards import SINGLE_FILE, sharded
from engine.models.llama_config import ARCHITECTURES

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class SafetensorsCheckpoint:
    """Owns the open shards."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        config_file = JsonFile.read(directory / "config.json")
        generation = JsonFile.read_optional(directory / "generation_config.json")
        self.architecture = architecture_of(config_file, ARCHITECTURES)
        self.config = decoder_config(config_file, self.architecture)
        text = read_text(directory, config_file)
        self.text = text.files
        self.eos_ids = all_eos_ids(config_file, generation, text)
        self.generation_defaults = sampling_defaults(generation)
        self._file_of = _files_by_tensor(directory)
        self._open = {path: _open_shard(path) for path in sorted(set(self._file_of.values()))}

    @property
    def tensor_names(self) -> Collection[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        path = self._file_of[name]
        try:
            return tuple(self._open[path].get_slice(name).get_shape())  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise _unreadable(path, name, error) from error

    def read(self, name: str, digest: Digest) -> Tensor:
        path = self._file_of[name]
        try:
            tensor: Tensor = self._open[path].get_tensor(name)  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise _unreadable(path, name, error) from error
        if tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{path}: tensor {name!r} has type {tensor.dtype}, which is not supported"
                " (supported: float32, float16, bfloat16)"
            )
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return tensor

    def close(self) -> None:
        self._open.clear()


def _unreadable(path: Path, name: str, error: SafetensorError) -> ModelError:
    return ModelError(f"{path}: tensor {name!r} cannot be read: {error}")


def _files_by_tensor(directory: Path) -> dict[str, Path]:
    single = directory / SINGLE_FILE
    if single.exists():
        names: list[str] = _open_shard(single).keys()  # type: ignore[no-untyped-call]
        return dict.fromkeys(names, single)
    return sharded(directory)


def _open_shard(path: Path) -> safe_open:
    try:
        open_regular(path).close()
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ModelError(f"{path}: missing file") from error
    except (SafetensorError, OSError, struct.error) as error:
        raise ModelError(f"{path}: corrupt or truncated safetensors file: {error}") from error
