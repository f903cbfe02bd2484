"""Values of settings as people write them: sizes, durations, switches, choices. Knows no setting by name."""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from typing import Literal, Union, get_args, get_origin

import msgspec

Kind = Literal["plain", "size", "duration", "texts"]

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS = {"ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
MAX_DURATION_S = 1e8
"""Three years: nobody waits longer, and the timers of an event loop end somewhere behind it."""
MAX_DIGITS = 20
_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})


def convert(raw: object, wanted: object, kind: Kind, choices: Sequence[str] = ()) -> object:
    """Return `raw` (text, or a value of a YAML file) as the field's type. Raises ValueError that ends "is not ...".

    "none" and YAML's null unset a value that may be absent.
    """
    inner, optional = split_optional(wanted)
    if raw is None or (isinstance(raw, str) and raw.strip().lower() == "none"):
        if optional:
            return None
        raise ValueError("must have a value")
    if kind == "size":
        return parse_size(raw)
    if kind == "duration":
        return parse_duration(raw)
    if kind == "texts":
        return parse_texts(raw)
    if inner is bool:
        return _parse_switch(raw)
    allowed = tuple(choices) or choices_of(inner)
    if allowed:
        return msgspec.convert(_parse_choice(raw, allowed), inner, strict=False)
    try:
        value: object = msgspec.convert(raw.strip() if isinstance(raw, str) else raw, inner, strict=False)
    except msgspec.ValidationError:
        raise ValueError(f"is not {_NAMES.get(inner, 'a valid value')}") from None
    if isinstance(value, str) and not _is_unicode(value):
        raise ValueError("is not Unicode text")
    return value


def _is_unicode(text: str) -> bool:
    """Bytes of a flag or a variable that are no UTF-8 come as surrogates, which no JSON can carry on."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


_NAMES: dict[object, str] = {int: "a whole number", float: "a number", str: "text (put it in quotes)"}


def split_optional(wanted: object) -> tuple[object, bool]:
    """Split `T | None` into (T, True); anything else is (itself, False)."""
    if get_origin(wanted) in (types.UnionType, Union):
        inner = [one for one in get_args(wanted) if one is not type(None)]
        return inner[0], len(inner) < len(get_args(wanted))
    return wanted, False


def choices_of(wanted: object) -> tuple[str, ...]:
    """The values of a Literal, or nothing."""
    inner, _ = split_optional(wanted)
    return tuple(str(one) for one in get_args(inner)) if get_origin(inner) is Literal else ()


def parse_size(raw: object) -> int:
    """Bytes of `2GiB`, `512 MB`, `1.5g` or a plain count. GiB is 1024 based, GB and G are 1000 based."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*?)b?", _text(raw).strip().lower())
    factor = (_UNITS | _BINARY_UNITS).get(match.group(2)) if match else None
    if match is None or factor is None:
        raise ValueError("is not a size such as 512MiB or 2GiB")
    number = match.group(1)
    if len(number) > MAX_DIGITS:
        raise ValueError("is not a size that any machine has")
    return int(float(number) * factor) if "." in number else int(number) * factor


def parse_duration(raw: object) -> float:
    """Seconds of `30`, `30s`, `1.5m`, `2h` or `500ms`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|)", _text(raw).strip().lower())
    if match is None:
        raise ValueError("is not a duration such as 30s, 5m or 1h")
    seconds = float(match.group(1)) * _SECONDS[match.group(2)]
    if seconds > MAX_DURATION_S:
        raise ValueError(f"is not a duration of at most {MAX_DURATION_S:g} s")
    return seconds


def format_size(size_bytes: int) -> str:
    """The shortest exact way to write a size that `parse_size` reads back."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        whole, rest = divmod(size_bytes, _BINARY_UNITS[unit.lower()])
        if whole and not rest:
            return f"{whole}{unit}B"
    return str(size_bytes)


def parse_texts(raw: object) -> tuple[str, ...]:
    """Texts of a list, of lines, or of words where there is one line alone without an end."""
    parts: Sequence[object] = raw if isinstance(raw, list) else ()
    if isinstance(raw, str):
        parts = raw.splitlines() if "\n" in raw else raw.split()
    texts = tuple(_text(part).strip() for part in parts)
    if not all(text and _is_unicode(text) for text in texts) or not (texts or raw == []):
        raise ValueError("is not a list of texts")
    return texts


def _text(raw: object) -> str:
    """YAML reads `30` as a number; a bool is an int to Python, and never a size or a time."""
    return "" if isinstance(raw, bool) or not isinstance(raw, str | int | float) else str(raw)


def _parse_switch(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    text = _text(raw).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError("is neither true nor false")


def _parse_choice(raw: object, allowed: Sequence[str]) -> str:
    text = _text(raw).strip().lower()
    if text not in allowed:
        raise ValueError(f"is not one of {', '.join(allowed)}")
    return text
