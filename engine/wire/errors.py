"""The error tree of engine/errors.py as data: type, message, code, parameter, value and numbers survive the wire."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from engine.errors import (
    ConfigError,
    DeadlineError,
    DrainingError,
    EngineDiedError,
    EngineError,
    EngineSilentError,
    HeadraceError,
    LoadingError,
    ModelError,
    PressureError,
    PromptTooLongError,
    RequestError,
    RequestFailedError,
    UnsupportedError,
)

Scalar = bool | int | float | str | None
MAX_TEXT_CHARS = 4096
"""Messages and values that echo user data are cut here."""

_INT64 = range(-(2**63), 2**63)


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """One error. Fields that its type does not have are None."""

    type: str
    message: str
    code: str
    param: str | None = None
    value: Scalar | list[Scalar] = None
    hint: str | None = None
    retry_after_s: float = 1.0
    progress: float = 0.0
    prompt_tokens: int = 0
    max_model_len: int = 0


_BUILDERS: dict[str, Callable[[WireError], HeadraceError]] = {
    "HeadraceError": lambda e: HeadraceError(e.message),
    "ConfigError": lambda e: ConfigError(e.message, hint=e.hint),
    "ModelError": lambda e: ModelError(e.message, hint=e.hint),
    "RequestError": lambda e: RequestError(e.message, param=e.param, value=e.value, code=e.code),
    "PromptTooLongError": lambda e: PromptTooLongError(e.prompt_tokens, e.max_model_len, param=e.param),
    "UnsupportedError": lambda e: UnsupportedError(e.message, param=e.param, value=e.value, code=e.code),
    "PressureError": lambda e: PressureError(e.message, retry_after_s=e.retry_after_s),
    "DrainingError": lambda e: DrainingError(e.message, retry_after_s=e.retry_after_s),
    "LoadingError": lambda e: LoadingError(e.message, progress=e.progress, retry_after_s=e.retry_after_s),
    "DeadlineError": lambda e: DeadlineError(e.message),
    "EngineError": lambda e: EngineError(e.message),
    "EngineDiedError": lambda e: EngineDiedError(e.message),
    "EngineSilentError": lambda e: EngineSilentError(e.message),
    "RequestFailedError": lambda e: RequestFailedError(e.message),
}


def _scalar(value: object) -> Scalar:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if value in _INT64 else str(value)
    return (value if isinstance(value, str) else repr(value))[:MAX_TEXT_CHARS]


def _value(value: object) -> Scalar | list[Scalar]:
    if isinstance(value, list | tuple):
        return [_scalar(item) for item in value[:64]]
    return _scalar(value)


def _known_type(error: HeadraceError) -> str:
    return next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _BUILDERS)


def to_wire(error: HeadraceError) -> WireError:
    """Return the error as data. A subclass that the tree does not list travels as its nearest listed parent."""
    return WireError(
        type=_known_type(error),
        message=str(error)[:MAX_TEXT_CHARS],
        code=error.code,
        param=getattr(error, "param", None),
        value=_value(getattr(error, "value", None)),
        hint=getattr(error, "hint", None),
        retry_after_s=getattr(error, "retry_after_s", 1.0),
        progress=getattr(error, "progress", 0.0),
        prompt_tokens=getattr(error, "prompt_tokens", 0),
        max_model_len=getattr(error, "max_model_len", 0),
    )


def from_wire(error: WireError) -> HeadraceError:
    """Rebuild the error. A type that this version does not know becomes an EngineError."""
    return _BUILDERS.get(error.type, _BUILDERS["EngineError"])(error)
