"""The error tree of the whole stack. It knows no HTTP status and no wire: server/errors.py maps it to responses.

HeadraceError
├── ConfigError             a flag, an environment variable or a configuration file is wrong (exit code 2)
├── ModelError              a model cannot be loaded: missing, corrupt, truncated or unsupported (exit code 2)
├── RequestError            one request is at fault; names the parameter and the value
│   ├── PromptTooLongError  prompt and model window do not fit; carries both numbers
│   └── UnsupportedError    the request asks for something this engine does not do
├── PressureError           no room now, the same request may succeed later; carries retry_after_s
│   ├── DrainingError       the target finishes what it has and takes nothing new
│   └── LoadingError        the model is still loading; carries the progress
├── DeadlineError           the request's deadline passed before it finished
└── EngineError             the engine itself is at fault
    ├── EngineDiedError     its process or connection is gone: the request may be resumed elsewhere
    │   └── EngineSilentError  it may live and does not answer: it has been given up
    └── RequestFailedError  this request failed inside the engine, all others go on
"""

from __future__ import annotations

MAX_MESSAGE_CHARACTERS = 2000


def _bounded(message: str) -> str:
    """Files have a say in messages about them: a name in one may have megabytes."""
    return message if len(message) <= MAX_MESSAGE_CHARACTERS else message[:MAX_MESSAGE_CHARACTERS] + "..."


class HeadraceError(Exception):
    """Root of the tree. `str(error)` is one line, fit for a user."""

    code = "internal_error"


class ConfigError(HeadraceError):
    """A setting is wrong. `hint` says what to try."""

    code = "config_error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(_bounded(message))
        self.hint = None if hint is None else _bounded(hint)


class ModelError(HeadraceError):
    """A model cannot be loaded. `hint` says what to try."""

    code = "model_error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(_bounded(message))
        self.hint = None if hint is None else _bounded(hint)


class RequestError(HeadraceError):
    """One request is at fault. `param` is the name the client used, or None when no single field is to blame."""

    code = "invalid_value"

    def __init__(
        self, message: str, *, param: str | None = None, value: object = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.value = value
        if code is not None:
            self.code = code


class PromptTooLongError(RequestError):
    """The prompt leaves no room for one output token in the model's window."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, max_model_len: int, *, param: str | None = None) -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has {prompt_tokens} tokens"
            " and at least one more is needed for the answer.",
            param=param,
            value=prompt_tokens,
        )
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class UnsupportedError(RequestError):
    """The request asks for something that this engine does not do; it is never ignored in silence."""

    code = "unsupported_parameter"


class PressureError(HeadraceError):
    """No room now. Neither a fault of the target nor of the client."""

    code = "server_is_overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DrainingError(PressureError):
    """The target finishes what it has and takes nothing new."""

    code = "server_is_draining"


class LoadingError(PressureError):
    """The model is still loading. `progress` is in [0, 1]."""

    code = "model_is_loading"

    def __init__(self, message: str, *, progress: float, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.progress = progress


class DeadlineError(HeadraceError):
    """The request's deadline passed before it finished."""

    code = "deadline_exceeded"


class EngineError(HeadraceError):
    """The engine is at fault, not the request."""

    code = "engine_error"


class EngineDiedError(EngineError):
    """The engine's process or connection is gone. What it emitted so far stays valid: the request may be resumed."""

    code = "engine_died"


class EngineSilentError(EngineDiedError):
    """It is connected and has not answered for too long, so that this connection was given up."""


class RequestFailedError(EngineError):
    """This one request failed inside the engine; all others go on."""

    code = "request_failed"
