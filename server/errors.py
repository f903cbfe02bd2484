"""From what went wrong to what the client is told: one table of statuses, types, codes and headers.

Knows the tree of engine/errors.py, what pydantic says of a body and what the framework says of a URL. Every error body
is OpenAI's nested object with its four keys. Retry-After stays under a minute because clients ignore longer ones, and
`x-should-retry: false` stops SDKs from repeating what cannot succeed.
"""

from __future__ import annotations

import http
import logging
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from engine.errors import (
    ConfigError,
    DeadlineError,
    DrainingError,
    EngineDiedError,
    EngineError,
    HeadraceError,
    LoadingError,
    ModelError,
    PressureError,
    RequestError,
    UnsupportedError,
)

logger = logging.getLogger("headrace.http")

MAX_RETRY_AFTER_S = 60
SHOWN_VALUE_CHARACTERS = 80
SHOWN_NAMES = 8
MAX_COMPARED_CHARACTERS = 200
"""Of a name of the client's that is compared with names that exist."""

Retry = Literal["default", "after", "never"]


class UnknownRequestError(RequestError):
    """Nothing is remembered of a request."""

    code = "request_not_found"


class UnknownModelError(RequestError):
    """The body or the URL names a model that is not served here."""

    code = "model_not_found"

    def __init__(self, model: str, served: Sequence[str]) -> None:
        names = ", ".join(repr(name) for name in served)
        message = f"The model {shown(model)} does not exist here. Served: {names}."
        super().__init__(message + _closest(model, served), param="model", value=model)


class BodyTooLargeError(RequestError):
    """The body is over the limit; it was not read to its end."""

    code = "request_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request body is larger than {limit_bytes} bytes.")


class BodyTooSlowError(RequestError):
    """The body did not arrive in time."""

    code = "request_timeout"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"The request body did not arrive within {timeout_s:g} s.")


class UnknownParamsError(RequestError):
    """The body has fields that nobody knows, and the server was told to mind them."""

    code = "unknown_parameter"

    def __init__(self, names: Sequence[str]) -> None:
        listed = ", ".join(shown(name) for name in names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")
        super().__init__(f"Unknown parameters: {listed}.", param=names[0][:SHOWN_VALUE_CHARACTERS])


class AuthenticationError(RequestError):
    """No key, or one that is not valid."""

    code = "invalid_api_key"


class ForbiddenError(RequestError):
    """Whoever asks may not do this."""

    code = "permission_denied"


class RateLimitError(HeadraceError):
    """The API key has used up what it may use in a minute; another key may go on."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TokensOverLimitError(RateLimitError):
    """The prompt alone has more tokens than the key may use in a minute: waiting does not help."""


class ClientGoneError(HeadraceError):
    """The client closed its connection: nobody reads the answer."""

    code = "client_closed_request"


@dataclass(frozen=True)
class Rule:
    """How one branch of the error tree is answered."""

    error: type[HeadraceError]
    status: int
    type: str
    retry: Retry = "default"
    headers: tuple[tuple[bytes, bytes], ...] = ()


# The first match wins, so a class stands before its bases.
TABLE: tuple[Rule, ...] = (
    Rule(UnknownModelError, 404, "invalid_request_error"),
    Rule(UnknownRequestError, 404, "invalid_request_error"),
    Rule(BodyTooLargeError, 413, "invalid_request_error"),
    Rule(BodyTooSlowError, 408, "invalid_request_error"),
    Rule(AuthenticationError, 401, "invalid_request_error", headers=((b"www-authenticate", b"Bearer"),)),
    Rule(ForbiddenError, 403, "permission_error"),
    Rule(RequestError, 400, "invalid_request_error"),
    Rule(LoadingError, 503, "service_unavailable_error", "after"),
    Rule(DrainingError, 503, "service_unavailable_error", "after"),
    Rule(PressureError, 429, "rate_limit_error", "after"),
    Rule(TokensOverLimitError, 429, "rate_limit_error", "never"),
    Rule(RateLimitError, 429, "rate_limit_error", "after"),
    Rule(ClientGoneError, 499, "invalid_request_error", "never"),
    Rule(DeadlineError, 504, "server_error", "never"),
    Rule(EngineDiedError, 503, "service_unavailable_error", "after"),
    Rule(EngineError, 500, "server_error", "never"),
    Rule(ConfigError, 500, "server_error", "never"),
    Rule(ModelError, 500, "server_error", "never"),
    Rule(HeadraceError, 500, "server_error", "never"),
)


@dataclass(frozen=True)
class ErrorReply:
    """An error as it goes out: `body` is whole JSON, the same in a response and in an event of a stream."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def event(self) -> bytes:
        """The error as the last event of a stream, which then ends without [DONE]."""
        return b"data: " + self.body + b"\n\n"


def reply_to(error: BaseException) -> ErrorReply:
    """Return the answer to any exception. What is not of our tree is logged and told as an internal error."""
    if isinstance(error, HTTPException):
        return _framework_reply(error)
    if isinstance(error, HeadraceError):
        rule = next(rule for rule in TABLE if isinstance(error, rule.error))
        body = error_body(str(error), rule.type, param=getattr(error, "param", None), code=error.code)
        retry = _retry_headers(rule.retry, getattr(error, "retry_after_s", 1.0))
        return ErrorReply(rule.status, body, rule.headers + retry)
    logger.error("request failed", exc_info=error)
    body = error_body("The server had an error while processing the request.", "server_error", code="internal_error")
    return ErrorReply(500, body, _retry_headers("never", 0))


def error_body(message: str, type: str, *, param: str | None = None, code: str | None = None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": type, "param": param, "code": code}})


def _retry_headers(retry: Retry, retry_after_s: float) -> tuple[tuple[bytes, bytes], ...]:
    if retry == "never":
        return ((b"x-should-retry", b"false"),)
    if retry == "after":
        seconds = min(MAX_RETRY_AFTER_S, max(1, math.ceil(retry_after_s)))
        return ((b"retry-after", str(seconds).encode()),)
    return ()


def _framework_reply(error: HTTPException) -> ErrorReply:
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    phrase = http.HTTPStatus(error.status_code).phrase
    message = error.detail if error.detail and error.detail != phrase else phrase + "."
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    headers = tuple((name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items())
    return ErrorReply(error.status_code, error_body(message, kind, code=code), headers)


def error_from_validation(error: ValidationError) -> RequestError:
    """Return pydantic's first complaint as a RequestError that names the field as the client wrote it."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = param_name(first["loc"])
    match first["type"]:
        case "missing":
            return RequestError(
                f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
            )
        case "unsupported":
            return UnsupportedError(first["msg"], param=param)
        case "model_type" | "dict_type" if param is None:
            return RequestError("The request body must be a JSON object.", code="invalid_type")
        case kind:
            code = "invalid_type" if kind.endswith("_type") else "invalid_value"
            what = "type" if code == "invalid_type" else "value"
            if param is None:  # several fields that do not go together
                return RequestError(f"{first['msg']}.", code=code)
            value = first["input"]
            return RequestError(
                f"Invalid {what} for '{param}': {first['msg']} (got {shown(value)}).",
                param=param,
                value=value,
                code=code,
            )


def _closest(model: str, served: Sequence[str]) -> str:
    """A question, where a served name is close, also in other letters or without its folder."""
    if len(model) > MAX_COMPARED_CHARACTERS:
        return ""
    simple = {form: name for name in served for form in (name.lower(), name.lower().rstrip("/").rpartition("/")[2])}
    close = get_close_matches(model.lower(), simple, n=1, cutoff=0.7)
    return f" Did you mean {simple[close[0]]!r}?" if close else ""


def param_name(location: Sequence[int | str]) -> str | None:
    """("messages", 0, "content") -> "messages[0].content"."""
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name or None


def shown(value: object) -> str:
    """A value of the client's, short enough for a message. Costs the same for a value of any size."""
    text = _SHORT.repr(value)
    return text if len(text) <= SHOWN_VALUE_CHARACTERS else text[:SHOWN_VALUE_CHARACTERS] + "..."


class _ShortRepr(reprlib.Repr):
    """Long strings keep their beginning, where the library's own form keeps both ends."""

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[: SHOWN_VALUE_CHARACTERS + 1])

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < 4096 else "a very large integer"


_SHORT = _ShortRepr()
_SHORT.maxlevel = 4
