"""The chat template that a setting names, instead of the model's own."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ConfigError
from engine.loader.files import read_regular


def template_source(value: str) -> bytes:
    """Return the template's source: `value` itself when it has Jinja's braces, else the file it names. Raises
    ConfigError."""
    if "{{" in value or "{%" in value:
        return value.encode()
    try:
        source = read_regular(Path(value).expanduser())
        source.decode()
    except (OSError, UnicodeDecodeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"chat template {value[:200]!r} cannot be read: {error}") from error
    return source
