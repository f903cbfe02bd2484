"""A JSON object from a file, whose values are asked for by type: a wrong one is an error that names file and key."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelError
from engine.loader.files import MAX_CONFIG_BYTES, read_regular

_DIRECTORY = "It needs config.json, model.safetensors and tokenizer.json; a GGUF file is given by its own path."

_INTEGERS = range(-(2**63), 2**63)

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


def shown(value: object) -> str:
    """A value of a file, short enough for a message."""
    return _SHORT.repr(value)


@dataclass(frozen=True, slots=True)
class JsonFile:
    """A JSON object and the path it came from, for messages."""

    path: Path
    values: Mapping[str, object]

    @classmethod
    def read(cls, path: Path, limit_bytes: int = MAX_CONFIG_BYTES) -> JsonFile:
        try:
            values = json.loads(read_regular(path, limit_bytes))
        except FileNotFoundError as error:
            raise ModelError(f"{path}: missing file", hint=_DIRECTORY) from error
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelError(f"{path}: must hold a JSON object")
        return cls(path, values)

    @classmethod
    def read_optional(cls, path: Path) -> JsonFile:
        return cls.read(path) if path.exists() else cls(path, {})

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{self.path}: {key!r} must be an integer, not {shown(value)}")
        if value not in _INTEGERS:
            raise ModelError(f"{self.path}: {key!r} is out of range: {shown(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ModelError(f"{self.path}: {key!r} must be a number, not {shown(value)}")
        if isinstance(value, int) and value not in _INTEGERS:
            raise ModelError(f"{self.path}: {key!r} is out of range: {shown(value)}")
        if not math.isfinite(value):  # Python reads NaN and Infinity, which are no JSON
            raise ModelError(f"{self.path}: {key!r} must be finite, not {shown(value)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: {key!r} must be true or false, not {shown(value)}")
        return value

    def nested(self, key: str) -> JsonFile:
        value = self.values.get(key)
        if value is None:
            return JsonFile(self.path, {})
        if not isinstance(value, dict):
            raise ModelError(f"{self.path}: {key!r} must be an object, not {shown(value)}")
        return JsonFile(self.path, value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return one id or a list of them as a tuple; absent is empty."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise ModelError(f"{self.path}: {key!r} must be a token id or a list of them, not {shown(value)}")
        return tuple(ids)
