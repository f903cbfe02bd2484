"""What a gateway is told about engines of other makes."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from engine.errors import ConfigError

ANY = ""
"""The name under which a tokenizer is for every model."""

KEY = re.compile(r"[!-~]{1,4096}")


class ForeignSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`tokenizers` are sources of models' tokenizers (directories, GGUF files, names) by model. `api_key` is sent to
    every such engine."""

    tokenizers: dict[str, str] = {}
    api_key: str | None = None


def tokenizers_of(spec: str | None) -> dict[str, str]:
    """Read `SOURCE`, or `MODEL=SOURCE,MODEL=SOURCE`. Raises ConfigError."""
    if spec is None:
        return {}
    if "=" not in spec:
        return {ANY: spec}
    pairs = [part.partition("=") for part in spec.split(",")]
    if not all(model.strip() and source.strip() for model, _, source in pairs):
        raise ConfigError(
            f"--tokenizer {spec[:200]!r} cannot be read.", hint="Give SOURCE, or MODEL=SOURCE,MODEL=SOURCE."
        )
    return {model.strip(): source.strip() for model, _, source in pairs}


def read_engine_key(path: str | None) -> str | None:
    """Return the first line of a file. Raises ConfigError."""
    if path is None:
        return None
    try:
        key = Path(path).expanduser().read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The engines' key in {path} cannot be read: {error}.") from None
    if not KEY.fullmatch(key):
        raise ConfigError(f"{path} holds no key: one line of printable characters is needed.")
    return key
