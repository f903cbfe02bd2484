"""Logging of every process: one line for each event on stderr, as text or as JSON, with probes left out.

Owns the root logger's only handler. Code elsewhere logs through `logging.getLogger(__name__)` and puts its values into
`extra`, whose fields become `key=value` or members of the JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]

PROBE_PATHS = frozenset({"/health", "/ready", "/metrics", "/load"})
"""Polled every few seconds by orchestrators and scrapers: in the log they would hide everything else."""

CHATTY = ("uvicorn", "asyncio", "httpx", "httpcore")
"""Libraries that tell at level info what our own lines tell already."""

_requests = logging.getLogger("headrace.requests")

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def configure(level: str = "info", log_format: LogFormat = "text", stream: TextIO | None = None) -> None:
    """Set up this process. Calling it again replaces the earlier set-up. `stream` is stderr when None."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(traces=level == "debug"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel(logging.NOTSET if level == "debug" else logging.WARNING)


def log_request(method: str, path: str, status: str, seconds: float, request_id: str) -> None:
    """Tell of a request when it has ended. Probes are told at level debug only."""
    level = logging.DEBUG if path in PROBE_PATHS else logging.INFO
    if _requests.isEnabledFor(level):
        extra = {"seconds": round(seconds, 3), "request": request_id}
        _requests.log(level, "%s %s %s", method, path, status, extra=extra)


class TextFormatter(logging.Formatter):
    """`time LEVEL logger: message key=value`. A failure is summed up in its line; `traces` appends the whole trace."""

    def __init__(self, *, traces: bool = False) -> None:
        super().__init__()
        self._traces = traces

    def format(self, record: logging.LogRecord) -> str:
        parts = [f"{_timestamp(record)} {record.levelname:<7} {record.name}: {_one_line(record.getMessage())}"]
        parts += [f"{key}={_one_line(str(value))}" for key, value in extra_fields(record).items()]
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            parts.append(f"[{_one_line(f'{type(error).__name__}: {error}')}{_where(error)}]")
        line = " ".join(parts)
        if error is not None and self._traces and record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the extra fields, and the trace of a failure."""

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, object] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **extra_fields(record),
        }
        if record.exc_info and record.exc_info[1] is not None:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str, ensure_ascii=False)


def extra_fields(record: logging.LogRecord) -> dict[str, object]:
    """What the caller put into `extra`."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _one_line(text: str) -> str:
    """Text of clients reaches the log: a line break in it must not forge an event."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
