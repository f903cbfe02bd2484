"""Which files of a Hugging Face directory hold its weights: one, or the shards that an index names. Opens none."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ModelError
from engine.loader.json_file import JsonFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def sharded(directory: Path) -> dict[str, Path]:
    """Return each tensor's shard, by the directory's index. Raises ModelError."""
    index = directory / INDEX_FILE
    if not index.exists():
        raise ModelError(f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = JsonFile.read(index).nested("weight_map").values
    if not weight_map:
        raise ModelError(f"{index}: 'weight_map' is missing or empty")
    files: dict[str, Path] = {}
    for name, file_name in weight_map.items():
        # A shard lies beside its index: a path out of the directory is refused rather than followed.
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ModelError(f"{index}: tensor {name!r} points to {file_name!r}, which is no file name")
        files[name] = directory / file_name
    return files
