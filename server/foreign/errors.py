"""From what another server answers to our error tree.

429, 503                 PressureError (LoadingError, DrainingError where it says so), with its Retry-After
401, 403, 404, 407       EngineError: the worker is set up wrongly, which is no fault of the request
other 4xx                RequestError, with its message, parameter and code
5xx, anything else       EngineDiedError: another engine may do better
"""

from __future__ import annotations

import math

import msgspec

from engine.errors import (
    DeadlineError,
    DrainingError,
    EngineDiedError,
    EngineError,
    HeadraceError,
    LoadingError,
    PressureError,
    RequestError,
    RequestFailedError,
)

MAX_MESSAGE_CHARACTERS = 500
MAX_RETRY_AFTER_S = 600.0
SETUP_STATUSES = frozenset({401, 403, 404, 407})


class Details(msgspec.Struct, frozen=True):
    message: str = ""
    param: object = None
    code: object = None
    type: object = None


class Nested(msgspec.Struct, frozen=True):
    error: Details


class Flat(msgspec.Struct, frozen=True):
    """Older servers: the error is the body, or its text, or a "detail"."""

    message: str | None = None
    error: str | None = None
    detail: str | None = None
    param: object = None
    code: object = None


def error_of_answer(status: int, retry_after: str | None, body: bytes) -> HeadraceError:
    """Return what an answer that is not 200 comes to."""
    details = _details(body)
    message = _message(details, f"The engine answered with status {status}.")
    code = details.code if isinstance(details.code, str) else None
    if status in (429, 503):
        return _pressure(code, message, _seconds(retry_after))
    if status in SETUP_STATUSES:
        return EngineError(f"The engine does not take requests from here (status {status}): {message}")
    if 400 <= status < 500:
        return RequestError(message, param=details.param if isinstance(details.param, str) else None, code=code)
    return EngineDiedError(message)


def error_of_body(body: bytes) -> HeadraceError:
    """Return what an error in the midst of a stream comes to: there is no status, so its code decides."""
    details = _details(body)
    message = _message(details, "The engine ended the request with an error.")
    code = details.code if isinstance(details.code, str) else ""
    if code == DeadlineError.code:
        return DeadlineError(message)
    if code in (EngineDiedError.code, DrainingError.code, LoadingError.code, PressureError.code):
        return EngineDiedError(message)
    if isinstance(details.code, int) and 400 <= details.code < 500:
        return RequestError(message)
    error = RequestFailedError(message)
    if code:
        error.code = code[:100]
    return error


def _pressure(code: str | None, message: str, retry_after_s: float) -> PressureError:
    if code == LoadingError.code:
        return LoadingError(message, progress=0.0, retry_after_s=retry_after_s)
    if code == DrainingError.code:
        return DrainingError(message, retry_after_s=retry_after_s)
    return PressureError(message, retry_after_s=retry_after_s)


def _details(body: bytes) -> Details:
    try:
        return msgspec.json.decode(body, type=Nested).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _flat_details(body)


def _flat_details(body: bytes) -> Details:
    try:
        found = msgspec.json.decode(body, type=Flat)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Details()
    return Details(found.message or found.error or found.detail or "", found.param, found.code)


def _message(details: Details, otherwise: str) -> str:
    """One line, whatever came."""
    return " ".join(details.message[:MAX_MESSAGE_CHARACTERS].split()) or otherwise


def _seconds(retry_after: str | None) -> float:
    """A date, which is allowed too, counts as a second: no clock but ours is asked."""
    try:
        seconds = float(retry_after or "1")
    except ValueError:
        return 1.0
    return min(MAX_RETRY_AFTER_S, max(0.0, seconds)) if math.isfinite(seconds) else 1.0
